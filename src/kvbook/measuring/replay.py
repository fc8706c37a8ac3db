"""Equal-input replay: which operation of a model gives a row other bits when fewer rows come with it.

A full pass is recorded, operation by operation.  Then the last rows run on top of the full pass's own keys and values,
and whatever an operation gives is compared with the recorded rows and at once overwritten by them.  So every operation
meets the full pass's inputs bit for bit, and a difference is that operation's own, not what an earlier one handed on.

Works on any stock model: operations are caught where the model's Python calls torch (`TorchFunctionMode`), and are
named by the module that was running.

Example
-------
>>> full, cache = record(model, ids)
>>> verdicts = replay_last(model, ids, full, cache, rows=1)
>>> [verdict.operation for verdict in verdicts if verdict.differing][0]
'self_attn.q_proj'
"""

import copy
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import Cache, PreTrainedModel

from kvbook.measuring import agreement

# Functions that move, make or count numbers and compute none of a row; matching them would only tie us to a model's
# wording.

_MOVES = frozenset((
    "arange", "bfloat16", "bincount", "cat", "chunk", "clone", "contiguous", "copy_", "detach", "dim", "empty",
        "empty_like",
    "expand", "expand_as", "flatten", "flip", "float", "full", "full_like", "gather", "half", "histc", "index_select",
    "is_floating_point", "item", "masked_fill", "narrow", "new_empty", "new_full", "new_zeros", "numel", "ones",
    "ones_like", "pad", "permute", "repeat", "repeat_interleave", "reshape", "roll", "select", "size", "split",
        "squeeze",
    "stack", "swapaxes", "tensor", "to", "tolist", "transpose", "tril", "triu", "type", "type_as", "unbind",
        "unflatten",
    "unsqueeze", "view", "view_as", "where", "zeros", "zeros_like", "__get__", "__getitem__", "__setitem__",
))

_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__"))
# The number of a layer in a module's path, and what stands behind it.
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.(.*))?$")

KINDS = ("embedding", "norm", "linear", "attention", "elementwise", "lm head")


@dataclass(frozen=True)
class Call:
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
        One of `KINDS`.
    output : Tensor
        What it gave.
    inputs : list of Tensor
        The floating-point tensors that it was given, parameters left out.
    """

    order: int
    layer: int | None
    operation: str
    kind: str
    output: torch.Tensor
    inputs: list[torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """What one operation made of the last rows, against the full pass's.

    Attributes
    ----------
    order, layer, operation, kind
        As for `Call`.
    inputs_equal : bool
        Whether every input had the full pass's bits.
    differing : int
        Elements whose bits differ.
    elements : int
        Elements compared.
    relative_rms : float
        Root mean square of the difference over that of the full pass's rows.
    """

    order: int
    layer: int | None
    operation: str
    kind: str
    inputs_equal: bool
    differing: int
    elements: int
    relative_rms: float


Key = tuple[str, str, int]


@dataclass
class _Where:
    """The modules that are running, innermost last, as `followed` keeps them."""

    stack: list[str] = field(default_factory=lambda: [""])

    @property
    def path(self) -> str:
        return self.stack[-1]


@contextmanager
def _followed(model: PreTrainedModel) -> Iterator[_Where]:
    where = _Where()

    def enter(name: str) -> Callable:
        return lambda *_: where.stack.append(name)

    def leave(*_) -> None:
        # A hook that returns something would replace the module's output.
        where.stack.pop()

    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield where
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


class _Watch(TorchFunctionMode, ABC):
    """Hands every arithmetic operation to `see`, with a key that is equal in passes of any number of rows."""

    def __init__(self, model: PreTrainedModel, where: _Where) -> None:
        super().__init__()
        self._where = where
        self._count: Counter[tuple[str, str]] = Counter()
        self._modules = dict(model.named_modules())
        self._parameters = {_storage(parameter) for parameter in model.parameters()}

    @abstractmethod
    def see(self, key: Key, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        """Take note of an operation, or put another result in the place of its own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _MOVES:
            return func(*args, **kwargs)
        given = [t for t in _tensors([args, kwargs]) if t.is_floating_point() and t.numel()]
        # An operation in place overwrites what it was given.
        kept = self.keep([t for t in given if _storage(t) not in self._parameters])
        output = func(*args, **kwargs)
        computes = isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel() and given
        # A view, or a dropout that is off, gives back what it was given.
        if computes and (_in_place(name) or _storage(output) not in {_storage(t) for t in given}):
            path = self._where.path
            self.see((path, name, self._count[path, name]), kept, output)
            self._count[path, name] += 1
        return output

    def keep(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in inputs]

    def name(self, key: Key) -> tuple[int | None, str, str]:
        """Give layer, operation and kind of a call."""
        path, function, _ = key
        module = self._modules[path]
        found = _LAYER.search(_up_to_layer(path))
        layer = int(found.group(1)) if found else None
        local = path[found.end() :].lstrip(".") if found else path
        leaf = next(module.children(), None) is None
        product = function in _PRODUCTS
        if function == "embedding":
            kind = "embedding"
        elif "norm" in type(module).__name__.lower():
            kind = "norm"
        elif product and leaf:
            kind = "linear" if layer is not None else "lm head"
        elif product or function in ("scaled_dot_product_attention", "softmax"):
            kind = "attention"
        else:
            kind = "elementwise"
        if leaf:
            return layer, local, kind
        does = {"scaled_dot_product_attention": "SDPA", "softmax": "softmax"}.get(
            function, "products" if product else "elementwise"
        )
        return layer, f"{local or 'block'}: {does}" if layer is not None else f"{local or 'model'}: {does}", kind


def _up_to_layer(path: str) -> str:
    """Cut a module's path behind the first number in it."""
    pieces = path.split(".")
    number = next((i for i, piece in enumerate(pieces) if piece.isdigit()), None)
    return "" if number is None else ".".join(pieces[: number + 1])


class _Record(_Watch):
    def __init__(self, model: PreTrainedModel, where: _Where) -> None:
        super().__init__(model, where)
        self.calls: dict[Key, Call] = {}

    def see(self, key: Key, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        self.calls[key] = Call(len(self.calls), *self.name(key), output.clone(), inputs)


def record(model: PreTrainedModel, ids: torch.Tensor) -> tuple[dict[Key, Call], Cache]:
    """Run all tokens at once and keep what every operation was given and gave."""
    return operations_of(model, lambda: model(ids, use_cache=True).past_key_values)


def operations_of(model: PreTrainedModel, run: Callable[[], Any]) -> tuple[dict[Key, Call], Any]:
    """Run something, and keep what every operation of the model in it was given and gave; give these and its result."""
    with _followed(model) as where, _Record(model, where) as mode:
        result = run()
    return mode.calls, result


def rows_of(full: torch.Tensor, like: torch.Tensor, first: bool) -> torch.Tensor | None:
    """Cut from a full pass's tensor the rows that a smaller pass has."""
    if full.ndim != like.ndim:
        return None
    # For one query transformers lays the heads that share keys out as rows.
    if full.ndim == 4 and full.shape[1] > like.shape[1]:
        row = full[..., :1, :] if first else full[..., -1:, :]
        if row.numel() == like.numel():
            return row.reshape(like.shape)
        if full.shape[2] > like.shape[2] and full.shape[1] % like.shape[1] == 0:
            # Both heads and rows are fewer: the full pass has its keys repeated.
            full = full[:, :: full.shape[1] // like.shape[1]]
    # With a mask it repeats keys for the heads that share them; without one the kernel does that itself.
    if full.ndim == 4 and like.shape[1] > full.shape[1] and like.shape[1] % full.shape[1] == 0:
        full = full.repeat_interleave(like.shape[1] // full.shape[1], dim=1)
    for dimension, (has, wanted) in enumerate(zip(full.shape, like.shape, strict=True)):
        if wanted > has:
            return None
        full = full.narrow(dimension, 0 if first else has - wanted, wanted)
    return full


class _Replay(_Watch):
    def __init__(
        self, model: PreTrainedModel, where: _Where, full: dict[Key, Call], first: bool, corrected: bool
    ) -> None:
        super().__init__(model, where)
        self._full, self._first, self._corrected = full, first, corrected
        self.verdicts: list[Verdict] = []

    def see(self, key: Key, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        call = self._full.get(key)
        expected = None if call is None else rows_of(call.output, output, self._first)
        if call is None or expected is None or expected.dtype != output.dtype:
            path, function, number = key
            raise ValueError(f"{path or 'model'}: call {number} of {function} has no counterpart in the full pass")
        differing = int((~agreement.bits_equal(expected, output)).sum())
        relative = agreement.drift(expected.flatten(), output.flatten()).relative_rms.item() if differing else 0.0
        self.verdicts.append(
            Verdict(
                call.order,
                call.layer,
                call.operation,
                call.kind,
                self._inputs_equal(call.inputs, inputs),
                differing,
                output.numel(),
                relative,
            )
        )
        if self._corrected:
            output.copy_(expected)

    def _inputs_equal(self, full: list[torch.Tensor], ours: list[torch.Tensor]) -> bool:
        # A mask may be there in one pass and not in the other; it is no row of the operation.
        for reference, given in zip(full, ours, strict=False):
            expected = rows_of(reference, given, self._first)
            if expected is None or not agreement.bits_equal(expected, given).all():
                return False
        return True


def replay_last(
    model: PreTrainedModel, ids: torch.Tensor, full: dict[Key, Call], cache: Cache, rows: int, corrected: bool = True
) -> list[Verdict]:
    """Run the last rows on top of a cache and compare every operation with the full pass."""
    prefix = ids.shape[1] - rows
    held = copy.deepcopy(cache)
    held.crop(prefix - held.get_seq_length())
    with _followed(model) as where, _Replay(model, where, full, False, corrected) as mode:
        model(ids[:, prefix:], past_key_values=held, use_cache=True)
    return mode.verdicts


def replay_first(
    model: PreTrainedModel, ids: torch.Tensor, full: dict[Key, Call], rows: int, corrected: bool = True
) -> list[Verdict]:
    """Run the first rows alone, as a prefill of a shorter text does, and compare every operation with the full pass.

    Parameters, result and errors as for `replay_last`.
    """
    with _followed(model) as where, _Replay(model, where, full, True, corrected) as mode:
        model(ids[:, :rows], use_cache=True)
    return mode.verdicts
