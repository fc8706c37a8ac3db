"""The switch itself: what is registered over torch's operators while it is on, and what is refused."""

import contextlib
import functools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
import transformers
from torch.nn import Parameter

from kvbook import UserError
from kvbook.exact import attention, attention_kernel, convolutions, experts, pointwise, recurrences, rows, steps, sums
from kvbook.exact.kernels import NotInvariant, Refusal, base, no_gradients
from kvbook.exact.visible import Seen
from kvbook.older import TRIED
from kvbook.settings import read_yaml

_TABLES = read_yaml(Path(__file__).with_suffix(".tables.yaml"))
_POINTWISE = tuple(f"aten::{name}" for name in _TABLES["pointwise"].split())
_REFUSED = re.compile(_TABLES["refused"], re.VERBOSE)
# On a GPU these share a row out among the more threads the fewer rows there are, as sums and means do.
_REFUSED_ON_A_GPU = re.compile(
    r"^aten::((std|var)(_mean)?|prod|nansum|norm)(\..*)?$|^aten::(sum|mean)\.(IntList_|dtype_)?out$"
)
# Namespaces of other libraries whose operators compute: quantized products, fused kernels.
_FOREIGN = re.compile(
    r"^(quantized|mkldnn|mkldnn_prepacked|mkl|fbgemm|torchao|bitsandbytes|torchvision|xformers|flash_attn)::"
)
_PATTERNS = {"CPU": (_REFUSED, _FOREIGN), "CUDA": (_REFUSED, _FOREIGN, _REFUSED_ON_A_GPU)}


class _State(threading.local):
    """What the softmax tells the product with the values that follows it in the same thread."""

    shape: torch.Size | None = None
    seen: Seen = Seen(())


_state = _State()


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    out, seen = pointwise.softmax(x, dim, half_to_float)
    _state.shape, _state.seen = (None if seen.plain else out.shape), seen
    return out


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    no_gradients("mm", left, right)
    return rows.product(left, right)


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta=1, alpha=1) -> torch.Tensor:
    no_gradients("addmm", bias, left, right)
    if beta == 1 and alpha == 1 and bias.dim() == 1 and bias.shape[0] == right.shape[1]:
        return rows.product(left, right, bias)
    return beta * bias + alpha * rows.product(left, right)


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    no_gradients("bmm", left, right)
    return rows.batched(left, right, _seen_by(left))


def _seen_by(left: torch.Tensor) -> Seen | None:
    """Find what the softmax before said of its queries, if this is the product with its probabilities."""
    shape, seen = _state.shape, _state.seen
    if shape is None:
        return None
    _state.shape = None
    heads = shape[1] if len(shape) == 4 else 1
    # An attention sink is dropped from the end of the probabilities.
    if left.shape[1] != shape[-2] or left.shape[2] not in (shape[-1], shape[-1] - 1) or len(left) != shape[0] * heads:
        return None
    found = seen.by_head(heads, left.shape[2])
    # What is left out must weigh nothing, whatever this product is.
    if found.visible is not None:
        weighty = left.masked_fill(found.visible, 0).any()
    else:
        weighty = torch.stack([left[i, :, :first].any() for i, first in enumerate(found.skipped)]).any()
    return None if weighty else found


def _baddbmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta=1, alpha=1) -> torch.Tensor:
    product = alpha * _bmm(left, right)
    return product if beta == 0 else beta * bias + product


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if (out := steps.product(x, weight, bias)) is not None:
        return out
    no_gradients("linear", x, weight, bias)
    if x.numel() == x.shape[-1] and type(weight) is Parameter and weight.dim() == 2:
        return steps.prepared(weight, bias)(x, bias)
    if weight.dim() != 2:
        return _matmul(x, weight.t()) + (0 if bias is None else bias)
    if x.dim() == 2:
        return rows.product(x, weight.t(), bias)
    out = rows.product(x.reshape(-1, x.shape[-1]), weight.t(), bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    no_gradients("matmul", left, right)
    if right.dim() == 1:
        return _matmul(left, right[:, None])[..., 0]
    if left.dim() == 1:
        return _matmul(left[None], right)[..., 0, :]
    if right.dim() == 2:
        return rows.product(left.reshape(-1, left.shape[-1]), right).view(*left.shape[:-1], right.shape[1])
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    flat = [x.expand(*batch, *x.shape[-2:]).reshape(batch.numel(), *x.shape[-2:]) for x in (left, right)]
    return _bmm(*flat).view(*batch, left.shape[-2], right.shape[-1])


_exists = torch._C._dispatch_has_kernel_for_dispatch_key
# What `base` must hold before it is replaced, or refused.
_STOCK = ("aten::mm", "aten::addmm", "aten::bmm", "aten::exp", "aten::log", "aten::topk", "aten::_softmax")
# What takes an operator's place, by part.
_OURS: dict[str, dict[str, Callable[..., object]]] = {
    "products": {
        "aten::mm": _mm, "aten::addmm": _addmm, "aten::bmm": _bmm, "aten::baddbmm": _baddbmm, "aten::linear": _linear,
        "aten::matmul": _matmul, "aten::_grouped_mm": experts.grouped_product,
        "aten::convolution": convolutions.convolution,
    },
    "attention": {"aten::_softmax": _softmax, "aten::scaled_dot_product_attention": attention.attend},
    "functions": {
        "aten::logsumexp": pointwise.logsumexp, "aten::linalg_vector_norm": sums.vector_norm,
        "aten::topk": experts.topk,
    },
}
PARTS = tuple(_OURS)
# On a GPU alone: there a sum is shared out among more threads the fewer rows there are.
_SUMS = {"CPU": {}, "CUDA": {"aten::mean.dim": sums.mean, "aten::sum.dim_IntList": sums.total}}


@functools.lru_cache(maxsize=4)
def _replacements(key: str, names: frozenset[str]) -> dict[str, dict[str, Callable[..., object]]]:
    """List what is registered for a dispatch key, by part and operator; made while torch's own kernels are in place.

    Once for all operators that there are: a library that is imported later brings more.
    """
    for name in (*_STOCK, attention_kernel.KERNELS[key], *_SUMS[key]):
        base(name, key)
    tables = {part: dict(table) for part, table in _OURS.items()}
    functions = tables["functions"]
    functions |= _SUMS[key]
    for name in (name for name in _POINTWISE if key == "CPU" and name in names and _exists(name, key)):
        plain, _, overload = name.partition(".")
        functions[name] = pointwise.pointwise(name)
        variant = f"{plain}_" + (".Scalar" if overload else "")
        if variant in names and _exists(variant, key):
            functions[variant] = pointwise.in_place(functions[name])
    # Some, such as a matrix times a vector, have one kernel for all devices.
    return tables | {"refused": {
        name: Refusal(name) for name in names.difference(*tables.values())
        if any(pattern.match(name) for pattern in _PATTERNS[key])
        and (_exists(name, key) or _exists(name, "CompositeExplicitAutograd"))
    }}


def part_of(operator: str, key: str) -> str | None:
    """Name the part that takes an operator's place, or ``refused``; None where torch's own stays."""
    if found := next((part for part, table in _OURS.items() if operator in table), None):
        return found
    element = key == "CPU" and operator.replace("_.Scalar", ".Tensor_Scalar").removesuffix("_") in _POINTWISE
    if element or operator in _SUMS[key]:
        return "functions"
    return "refused" if any(pattern.match(operator) for pattern in _PATTERNS[key]) else None


def _of(parts: Collection[str], key: str, names: frozenset[str]) -> dict[str, Callable[..., object]]:
    """List the replacements of some parts; with fewer than all stock's own kernels are needed: nothing is refused."""
    kept = (*PARTS, "refused") if set(parts) == set(PARTS) else parts
    table = _replacements(key, names)
    return {name: function for part in kept for name, function in table[part].items()}


def _refuse_untried(untried: bool) -> None:
    """Refuse a release whose classes may compute with functions that the switch does not know: bits differ silently."""
    if not hasattr(torch.library, "get_kernel"):
        raise NotInvariant(f"row_invariant() needs torch 2.9 or newer, and this is {torch.__version__}: update torch")
    if not untried and (release := transformers.__version__) not in TRIED:
        remedy = f"use {TRIED[-1]}, or pass untried=True and see that kvbook.exact.verify finds no difference"
        what = f"row_invariant() was never tried on transformers {release}, and may leave bits different there"
        raise NotInvariant(f"{what}: {remedy}")


_lock = threading.RLock()
_depth = 0
_changes = contextlib.ExitStack()


def _switched_on(parts: Collection[str]) -> contextlib.ExitStack:
    """Replace everything, and return what puts it back."""
    if unknown := set(parts) - set(PARTS):
        raise UserError(f"row_invariant() has no part {min(unknown)!r}: choose from {', '.join(PARTS)}")
    names = frozenset(torch._C._dispatch_get_all_op_names())
    keys = ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)
    tables = {key: _of(parts, key, names) for key in keys}
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        stack.enter_context(recurrences.token_by_token())
        stack.enter_context(steps.without_the_dispatcher(tables["CPU"]))
        if "torch._dynamo" in sys.modules or "CUDA" in tables:
            # What a compiler made does not go through the operators that are replaced. On a GPU `generate` compiles by
            # itself when it gets a static cache, perhaps for the first time inside the block.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(steps.forget)
        if "CUDA" in tables:
            # On a CPU masks are small, and the next block wants them again.
            stack.callback(attention.forget)
        # torch warns that a kernel is replaced, which is what is meant.
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel.*")
        opened: dict[str, torch.library.Library] = {}
        for key, table in tables.items():
            for name, function in table.items():
                namespace, _, operator = name.partition("::")
                if namespace not in opened:
                    opened[namespace] = torch.library.Library(namespace, "IMPL")
                    stack.callback(opened[namespace]._destroy)
                opened[namespace].impl(operator, function, key)
        return stack.pop_all()


def is_on() -> bool:
    """Tell whether a `row_invariant` block is open in this process."""
    return _depth > 0


@contextlib.contextmanager
def row_invariant(parts: Collection[str] = PARTS, untried: bool = False) -> Iterator[None]:
    """Make the bits of a row independent of how many rows, and of how many keys after its own, come with it.

    Inside the block, any causal language model of transformers gives equal bits, in logits, hidden states and caches,
    for equal token ids, however they are fed: all at once, a prefix and then the rest, in chunks, token by token,
    through ``generate``, with a dynamic or a static cache of any length, alone or in a batch, left-padded or not.

    Parameters
    ----------
    parts : collection of str
        What to make invariant, to see what each part does: ``products`` (of matrices), ``attention`` (with its
        softmax), ``functions`` (of single elements).  Only all three together keep the promise, and only they refuse
        what they cannot keep it for.  A block inside another one takes on the outer one's.
    untried : bool
        Whether to go on where the installed transformers is none of `kvbook.exact.TRIED`, the releases on which every
        architecture was tried; there the promise is not known to hold.

    Raises
    ------
    NotInvariant
        On a release that was not tried, or with a torch before 2.9.  Inside the block, by an operation that is met and
        cannot be made invariant, naming it: convolutions in more than one dimension, quantized products, recurrent
        networks, batch norms, attention dropout, a backward pass.

    See Also
    --------
    kvbook.exact.verify : Try it on a model of one's own.

    Notes
    -----
    - Works by registering kernels over torch's operators, below its Python interface, so it does not matter from
      where an operator is called. For speed a decode step's linear layers, attention and norms are found above
      it. Everything is restored on leaving, also by an exception. Blocks nest.
    - On a CPU products in fp32 have a kernel of their own, and so have those in 16 bits where an x86 processor
      has no instructions for them (bf16 before AVX512-BF16, fp16 before AVX512-FP16). It is compiled on first
      use, in about three seconds, with the compiler that ``CXX`` names, else ``c++``, ``g++`` or ``clang++``, and
      kept in the folder ``kvbook/kernels`` of a person's caches. Without a compiler, or with an empty ``CXX``,
      results are as invariant, but slower and with a larger error.
    - It is on for the whole process while any thread is inside: other threads' results are right, and invariant
      too.
    - Bits are those of this machine, these versions and this number of threads; all that is promised is that they
      are equal among the ways above. What the machine grants is found out by comparing bits, on first use, and
      remembered.
    - Needs autograd off (``torch.inference_mode()`` or ``torch.no_grad()``) where weights want gradients.
      Functions made by ``torch.compile`` before the block run uncompiled in it.
    - Where queries begin at different keys, as beyond a sliding window, or see a sink or chosen keys, each
      query's keys are drawn together before they are summed. A decode step does that by itself; a prefill beyond
      the window is slower.
    - Mixtures of experts run expert by expert, each row a product of its own. A convolution along a text is a sum
      of its taps.
    - State-space models and linear attention read a text token by token, with the formula of a decode step: a
      prefill is slow. Classes of transformers are replaced, also those imported inside the block. What no formula
      is known for is refused when its state reaches the cache.
    - Left padding: pass ``attention_mask`` and, to models that count positions (all but MPT), ``position_ids``
      that start at 0 with the first real token, as ``generate`` does by itself; else the positions are others,
      and so the results.
    - A model that itself computes another formula with its cache than without (ProphetNet's streams) is not made
      to agree: no operation is at fault, and none can be named. `verify` shows it.
    - Each attention implementation ("eager", "sdpa") equals itself, not the other one. Others are not supported.
    - On a CPU norms and other sums over a row are torch's own, which take a row by itself; rows of 32,768
      elements or more have not been tried.
    - MPT's bias is taken relative to the query instead of to the last key, which is equal but for rounding.
    - On CUDA row counts, torch's memory-efficient attention and the layer norm that sums take are tried bit for
      bit in the same way; its layer norm, a block of threads for each row, and its functions of single elements
      are taken as they are. None of this has been run on a GPU yet, so see that `verify` finds no difference on
      yours. Eager attention is slow there, and running sums (``cumsum``, in top-p sampling) are torch's own, so
      that what is drawn may depend on the batch.

    Examples
    --------
    >>> from kvbook.exact import row_invariant
    >>> with torch.inference_mode(), row_invariant():
    ...     full = model(ids).logits
    ...     cache = model(ids[:, :-1], use_cache=True).past_key_values
    ...     last = model(ids[:, -1:], past_key_values=cache).logits
    >>> torch.equal(full[:, -1], last[:, -1])
    True
    """
    global _depth, _changes
    _refuse_untried(untried)
    with _lock:
        if not _depth:
            _changes = _switched_on(parts)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _changes.close()
