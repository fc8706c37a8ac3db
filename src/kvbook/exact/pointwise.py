"""Functions of single elements, and the softmax, in which an element's place does not matter.

A vectorised loop treats what is left over at its end, and at the end of each thread's share, with scalar code, whose
exponential is not the vector code's.  So an element's last bit depends on where it lies.  Here a function only ever
runs on a number of elements that leaves nothing over.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch

from kvbook.exact import visible
from kvbook.exact.kernels import base, draw, key_of, met

# Elements that one turn of a vectorised loop takes: two registers of 64 bytes, of two bytes an element at least.
_TURN = 64
# Up to so many threads all shares can be made even by padding; beyond, a function runs in pieces too small to share
# out.
_FEW_THREADS = 4
_PIECE = 2048

# Probabilities are summed in blocks of this many keys, one after the other.
_BLOCK = 128
# torch's softmax for a CPU takes a row by itself, and sums in as many sums side by side as a register holds; made up to
# a multiple of them, by keys that weigh nothing, no row has a rest.
_LANES = 16
# Numbers of rows and of keys at which that is tried.
_TRIED_ROWS, _TRIED_KEYS = (1, 7, 130), (_LANES, 4 * _LANES, 11 * _LANES, 65 * _LANES, 300 * _LANES)

# Whose results are rounded correctly by vector and scalar code alike, by IEEE 754, in these dtypes.
_CORRECTLY_ROUNDED = dict.fromkeys(("aten::sqrt", "aten::rsqrt", "aten::reciprocal"), (torch.float32, torch.float64))


@functools.cache
def _quantum(threads: int) -> int:
    return _TURN * math.lcm(*range(1, threads + 1))


@functools.cache
def pointwise(operator: str) -> Callable[..., torch.Tensor]:
    """Make a function of single elements independent of their places."""
    kernel = base(operator, "CPU")
    exempt = _CORRECTLY_ROUNDED.get(operator, ())
    is_power = operator == "aten::pow.Tensor_Scalar"

    def function(x: torch.Tensor, *arguments, **options) -> torch.Tensor:
        if is_power and x.is_floating_point() and type(arguments[0]) in (int, float) and arguments[0] == 2:
            # One product, rounded correctly in every dtype, wherever it lies; every norm takes one.
            return x * x
        if x.dtype in exempt:
            return kernel(x, *arguments, **options)
        threads = torch.get_num_threads()
        n = x.numel()
        if threads > _FEW_THREADS and n > _PIECE:
            pieces = [function(piece, *arguments, **options) for piece in x.reshape(-1).split(_PIECE)]
            return torch.cat(pieces).view(x.shape)
        quantum = _quantum(threads) if threads <= _FEW_THREADS else _TURN
        if n % quantum == 0:
            found = kernel(x.contiguous(), *arguments, **options)
        else:
            padded = x.new_ones(-(-n // quantum) * quantum)
            padded[:n] = x.reshape(-1)
            found = kernel(padded, *arguments, **options)[:n].view(x.shape)
        # Sums that follow take the order in which things lie, so that is kept.
        if x.is_contiguous() or (like := torch.empty_like(x, dtype=found.dtype)).stride() == found.stride():
            return found
        return like.copy_(found)

    return function


def in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Turn a function into the variant that writes into its argument."""

    def variant(x: torch.Tensor, *arguments, **options) -> torch.Tensor:
        return x.copy_(function(x, *arguments, **options))

    return variant


def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> tuple[torch.Tensor, visible.Seen]:
    """Take a softmax whose rows do not change with masked elements before, between or after their own.

    With it goes what the queries see, where these are attention's scores.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    last = dim in (-1, x.dim() - 1)
    scores = (x if last else x.movedim(dim, -1)).to(wide)
    seen = visible.seen(scores)
    if not seen.plain:
        # Two masks that are added up give minus infinity: a query that sees nothing is padding, and must give numbers
        # all the same, for they become keys and values.
        scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    if seen.plain:
        out = _softmax(scores)
    elif seen.visible is None:
        out = torch.zeros_like(scores)
        for index, first in enumerate(seen.skipped):
            out[index, ..., first:] = _softmax(scores[index, ..., first:])
    else:
        together, places = visible.drawn_together(scores, seen.visible)
        out = _softmax(together).gather(-1, places).masked_fill_(~seen.visible, 0)
    out = out.to(wide if half_to_float else x.dtype)
    return (out if last else out.movedim(-1, dim)), seen


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    keys = scores.shape[-1]
    if scores.is_cpu and _stock_holds(scores.dtype, torch.get_num_threads()):
        # Few operators: each costs a decode step its microseconds.
        stock, more = base("aten::_softmax", "CPU"), -keys % _LANES
        if not more:
            return stock(scores, -1, False)
        return stock(torch.constant_pad_nd(scores, (0, more), -torch.inf), -1, False)[..., :keys]
    parts = _function_on(scores, "aten::exp")(scores - scores.amax(-1, keepdim=True))
    return parts / _in_blocks(parts)[..., None]


@functools.cache
def _stock_holds(dtype: torch.dtype, _threads: int) -> bool:
    """Tell whether torch's softmax gives a row equal bits alone, among others, and with masked keys after its own."""
    stock = base("aten::_softmax", "CPU")
    for rows, keys in itertools.product(_TRIED_ROWS, _TRIED_KEYS):
        scores = draw((rows, keys), seed=1, scale=4, used_in=dtype).to(dtype)
        alone = torch.cat([stock(row.clone(), -1, False) for row in scores.split(1)])
        for longer in _TRIED_KEYS:
            if longer >= keys:
                x = torch.constant_pad_nd(scores, (0, longer - keys), -torch.inf)
                if not torch.equal(stock(x, -1, False)[:, :keys], alone):
                    return False
    return True


def _in_blocks(parts: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension in blocks, one after the other."""
    blocks = parts.new_zeros(*parts.shape[:-1], -(-parts.shape[-1] // _BLOCK) * _BLOCK)
    blocks[..., : parts.shape[-1]] = parts
    sums = blocks.unflatten(-1, (-1, _BLOCK)).sum(-1)
    total = sums[..., 0]
    for block in sums.unbind(-1)[1:]:
        total = total + block
    return total


def logsumexp(x: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """Stand in for ``aten::logsumexp``, with the sum that `softmax` divides by."""
    if len(dim) != 1 or not x.is_floating_point():
        raise met(f"aten::logsumexp over {len(dim)} dimensions", "it can do one")
    scores = x.movedim(dim[0], -1).to(torch.promote_types(x.dtype, torch.float32))
    seen = visible.seen(scores)
    if not seen.plain:
        shown = seen.visible if seen.visible is not None else scores >= visible.MASKED
        scores = visible.drawn_together(scores, shown | ~shown.any(-1, keepdim=True))[0]
    largest = scores.amax(-1, keepdim=True)
    parts = _function_on(x, "aten::exp")(scores - largest)
    found = (largest + _function_on(x, "aten::log")(_in_blocks(parts)[..., None])).to(x.dtype)
    return found.movedim(-1, dim[0]) if keepdim else found[..., 0]


def _function_on(x: torch.Tensor, operator: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Find a function for a tensor's device.

    On a GPU what a vectorised loop leaves over runs the same function, compiled once more; that it has the same bits
    there is not tried.
    """
    return base(operator, "CUDA") if key_of(x) == "CUDA" else pointwise(operator)
