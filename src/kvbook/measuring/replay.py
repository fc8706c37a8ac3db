"""Equal-input replay: which operation of a model changes a row's bits when fewer rows come with it.

A full pass is recorded, operation by operation.  Then the last rows run on top of the full pass's own keys and values.
Each result is compared with the recorded rows and at once overwritten by them.  So every operation has the full pass's
inputs bit for bit, and a difference is that operation's own, not one that an earlier operation propagated.

Works on any stock model: operations are caught where the model's Python calls torch (`TorchFunctionMode`), and are
named by the module that was running.

Example
-------
>>> full, cache = record(model, ids)
>>> replayed = replay_last(model, ids, full, cache, rows=1)
>>> [one.call.operation for one in replayed if one.differing][0]
'self_attn.q_proj'
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from transformers import Cache, PreTrainedModel

from kvbook.measuring import agreement, caches
from kvbook.settings import read_yaml

# Functions that compute no number of a row.
_MOVES = frozenset(read_yaml(Path(__file__).with_suffix(".tables.yaml")))
_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__"))
_ATTENTION = {"scaled_dot_product_attention": "SDPA", "softmax": "softmax"}
# The first number in a module's path is that of its layer.
_LAYER = re.compile(r"(?:.*?\.)??(\d+)(?:\.(.*))?")


class Call(NamedTuple):
    """One arithmetic operation of the full pass.

    Attributes
    ----------
    order : int
        Its place in the pass.
    layer : int or None
        The layer it belongs to; None outside the layers.
    operation : str
        Path of its module within the layer, and what it does where the module does more than one thing.
    kind : str
        "embedding", "norm", "linear", "attention", "elementwise" or "lm head".
    output : Tensor
        Its result.
    inputs : list of Tensor
        The floating-point tensors that it was given, parameters left out.
    """

    order: int
    layer: int | None
    operation: str
    kind: str
    output: torch.Tensor
    inputs: list[torch.Tensor]


class Replayed(NamedTuple):
    """What one operation computes for the rows of a smaller pass, against the full pass's.

    Attributes
    ----------
    call : Call
        The operation in the full pass.
    inputs_equal : bool
        Whether every input had the full pass's bits.
    differing : int
        Elements whose bits differ.
    elements : int
        Elements compared.
    relative_rms : float
        Root mean square of the difference over that of the full pass's rows.
    """

    call: Call
    inputs_equal: bool
    differing: int
    elements: int
    relative_rms: float


# Module, function of torch, and how often it has run there: equal in passes of any number of rows.
Key = tuple[str, str, int]
See = Callable[[Key, list[torch.Tensor], torch.Tensor], None]


class _Watch(TorchFunctionMode):
    """Calls `see` with every arithmetic operation; `running` has the modules that run, innermost last."""

    def __init__(self, model: PreTrainedModel, running: list[str], see: See) -> None:
        super().__init__()
        self._running, self._see = running, see
        self._count: Counter[tuple[str, str]] = Counter()
        self._parameters = {_storage(parameter) for parameter in model.parameters()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _MOVES:
            return func(*args, **kwargs)
        tensors = (t for t in _pytree.tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor))
        given = [t for t in tensors if t.is_floating_point() and t.numel()]
        # An operation in place overwrites what it was given.
        kept = [t.clone() for t in given if _storage(t) not in self._parameters]
        output = func(*args, **kwargs)
        computes = isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel() and given
        # A view, or a dropout that is off, returns what it was given.
        if computes and (_in_place(name) or _storage(output) not in map(_storage, given)):
            place = self._running[-1], name
            self._see((*place, self._count[place]), kept, output)
            self._count[place] += 1
        return output


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


@contextmanager
def _watched(model: PreTrainedModel, see: See) -> Iterator[None]:
    """Call `see` with every arithmetic operation that the model runs in the block."""
    running, names = [""], {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _given: Any) -> None:
        # What is none of the model's modules, such as a loss, is part of the one that runs it.
        running.append(names.get(module, running[-1]))

    def leave(*_) -> None:
        # A hook that returns something would replace the module's output.
        running.pop()

    with (
        register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True),
        _Watch(model, running, see),
    ):
        yield


def _named(modules: Mapping[str, nn.Module], path: str, function: str) -> tuple[int | None, str, str]:
    """Return layer, operation and kind of a call."""
    found = _LAYER.fullmatch(path)
    layer, local = (int(found[1]), found[2] or "block") if found else (None, path or "model")
    leaf, product = next(modules[path].children(), None) is None, function in _PRODUCTS
    if function == "embedding":
        kind = "embedding"
    elif "norm" in type(modules[path]).__name__.lower():
        kind = "norm"
    elif product and leaf:
        kind = "linear" if found else "lm head"
    else:
        kind = "attention" if product or function in _ATTENTION else "elementwise"
    does = _ATTENTION.get(function, "products" if product else "elementwise")
    return layer, local if leaf else f"{local}: {does}", kind


def operations_of(model: PreTrainedModel, run: Callable[[], Any]) -> tuple[dict[Key, Call], Any]:
    """Run something; return the inputs and the output of every operation of the model, and its result."""
    calls, modules = {}, dict(model.named_modules())

    def keep(key: Key, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        calls[key] = Call(len(calls), *_named(modules, *key[:2]), output.clone(), inputs)

    with _watched(model, keep):
        return calls, run()


def record(model: PreTrainedModel, ids: torch.Tensor) -> tuple[dict[Key, Call], Cache]:
    """Run all tokens at once and keep the inputs and the output of every operation."""
    cache = caches.recording(model.config)
    return operations_of(model, lambda: model(ids, past_key_values=cache, use_cache=True).past_key_values)


def rows_of(full: torch.Tensor, like: torch.Tensor, first: bool) -> torch.Tensor | None:
    """Cut from a full pass's tensor the rows that a smaller pass has."""
    if full.ndim != like.ndim:
        return None
    # For one query transformers lays the heads that share keys out as rows.
    if full.ndim == 4 and full.shape[1] > like.shape[1]:
        row = full[..., :1, :] if first else full[..., -1:, :]
        if row.numel() == like.numel():
            return row.reshape(like.shape)
        if full.shape[1] % like.shape[1] == 0:
            # Heads are fewer: the full pass has its keys repeated.
            full = full[:, :: full.shape[1] // like.shape[1]]
    # With a mask it repeats keys for the heads that share them; without one the kernel does that itself.
    if full.ndim == 4 and like.shape[1] > full.shape[1] and like.shape[1] % full.shape[1] == 0:
        full = full.repeat_interleave(like.shape[1] // full.shape[1], dim=1)
    for dimension, (has, wanted) in enumerate(zip(full.shape, like.shape, strict=True)):
        if wanted > has:
            return None
        if wanted < has:
            full = full.narrow(dimension, 0 if first else has - wanted, wanted)
    return full


def _replayed(
    model: PreTrainedModel, ids: torch.Tensor, full: Mapping[Key, Call], first: bool, cache: Cache | None = None,
    corrected: bool = True,
) -> list[Replayed]:
    """Run the first or the last rows of the full pass and compare every operation with it."""
    replayed = []

    def compare(key: Key, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        call = full.get(key)
        expected = None if call is None else rows_of(call.output, output, first)
        if expected is None or expected.dtype != output.dtype:
            path, function, number = key
            raise ValueError(f"{path or 'model'}: call {number} of {function} has no counterpart in the full pass")
        differing = int((~agreement.bits_equal(expected, output)).sum())
        relative = agreement.drift(expected.flatten(), output.flatten()).relative_rms.item() if differing else 0.0
        # A mask may be there in one pass and not in the other; it is no row of the operation.
        pairs = ((rows_of(whole, given, first), given) for whole, given in zip(call.inputs, inputs, strict=False))
        equal = all(rows is not None and agreement.bits_equal(rows, given).all() for rows, given in pairs)
        replayed.append(Replayed(call, equal, differing, output.numel(), relative))
        if corrected:
            output.copy_(expected)

    with _watched(model, compare):
        model(ids, past_key_values=cache, use_cache=True)
    return replayed


def replay_last(
    model: PreTrainedModel, ids: torch.Tensor, full: Mapping[Key, Call], cache: Cache, rows: int, corrected: bool = True
) -> list[Replayed]:
    """Run the last rows on top of a cache and compare every operation with the full pass."""
    prefix = ids.shape[1] - rows
    held = copy.deepcopy(cache)
    held.crop(prefix - held.get_seq_length())
    return _replayed(model, ids[:, prefix:], full, False, held, corrected)


def replay_first(model: PreTrainedModel, ids: torch.Tensor, full: Mapping[Key, Call], rows: int) -> list[Replayed]:
    """Run the first rows alone, as a prefill of a shorter text does, and compare every operation with the full pass."""
    return _replayed(model, ids[:, :rows], full, first=True)


# Which operation is the first whose result for a token changes when fewer tokens come with it: two full passes are
# recorded, of a text and of its beginning, and compared on the tokens that they share.  No cache takes part, so every
# causal class can be asked.


class FirstOperation(NamedTuple):
    """Where a pass of fewer tokens first is not bitwise identical.

    Attributes
    ----------
    rows : int
        Tokens of the shorter pass.
    function : str
        Of torch, that was called.
    call : Call
        The operation in that pass.
    on_equal_inputs : bool
        Whether all of its inputs are bitwise identical, so that the difference is its own.  Otherwise it lies where
        rows cannot be compared: sorted by expert, or scanned in chunks.
    """

    rows: int
    function: str
    call: Call
    on_equal_inputs: bool


def _equal(full: torch.Tensor, fewer: torch.Tensor, rows: int) -> bool:
    """Compare what two passes share; positions beyond the rows, as padding makes them, see later tokens."""
    expected = rows_of(full, fewer, first=True)
    if expected is None or expected.dtype != fewer.dtype:
        return False
    for dimension, (has, ours) in enumerate(zip(full.shape, fewer.shape, strict=True)):
        if has > ours > rows:
            expected, fewer = (each.narrow(dimension, 0, rows) for each in (expected, fewer))
    return bool(agreement.bits_equal(expected, fewer).all())


def _between(full: dict[Key, Call], fewer: dict[Key, Call], rows: int) -> FirstOperation | None:
    """Find the first operation that differs on equal inputs; else the first that differs, if the last one does."""
    unequal, ended_equal = None, True
    for key, call in fewer.items():
        reference = full.get(key)
        ended_equal = reference is not None and _equal(reference.output, call.output, rows)
        if ended_equal:
            continue
        if reference is not None and rows_of(reference.output, call.output, first=True) is not None:
            # A mask may be there in one pass and not in the other.
            given = zip(reference.inputs, call.inputs, strict=False)
            if all(_equal(one, other, rows) for one, other in given):
                return FirstOperation(rows, key[1], call, True)
        unequal = unequal or FirstOperation(rows, key[1], call, False)
    return None if ended_equal else unequal


def first_operation(model: PreTrainedModel, ids: torch.Tensor, counts: Iterable[int]) -> FirstOperation | None:
    """Find the first operation, in order of execution, whose result for a token depends on how many come with it."""
    full, _ = operations_of(model, lambda: model(ids, use_cache=False))
    found = []
    for rows in counts:
        fewer, _ = operations_of(model, lambda rows=rows: model(ids[:, :rows], use_cache=False))
        found.append(_between(full, fewer, rows))
    return min(filter(None, found), key=lambda each: (not each.on_equal_inputs, each.call.order), default=None)
