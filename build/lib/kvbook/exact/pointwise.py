"""Functions of single elements, and the softmax, in which an element's place does not matter.

A vectorised loop treats what is left over at its end, and at the end of each thread's share, with scalar code, whose
exponential is not the vector code's.  So an element's last bit depends on where it lies.  Here a function only ever runs
on a number of elements that leaves nothing over.
"""

import contextlib
import functools
import math
from collections.abc import Callable

import torch

from kvbook.exact.kernels import NotInvariant, base, key_of

# Elements that one turn of a vectorised loop takes: two registers of 64 bytes, of two bytes an element at least.
_TURN = 64
# Up to so many threads all shares can be made even by padding; beyond, a function runs in pieces too small to share out.
_FEW_THREADS = 4
_PIECE = 2048

# A score as low as this is a mask's; attention's own scores are nowhere near it, fp16's mask is at -65,504.
MASKED = -3e4
# Probabilities are summed in blocks of this many keys, one after the other.
_BLOCK = 128

# Whose results are rounded correctly by vector and scalar code alike, by IEEE 754, in these dtypes.
_CORRECTLY_ROUNDED = {"aten::sqrt": (torch.float32, torch.float64), "aten::rsqrt": (torch.float32, torch.float64),
                      "aten::reciprocal": (torch.float32, torch.float64)}  # fmt: skip


@functools.cache
def _quantum(threads: int) -> int:
    return _TURN * math.lcm(*range(1, threads + 1))


@functools.cache
def pointwise(operator: str) -> Callable[..., torch.Tensor]:
    """Make a function of single elements independent of their places.

    Parameters
    ----------
    operator : str
        Such as ``aten::silu``; its first argument is the tensor.
    """
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
            flat = x.reshape(-1)
            pieces = [function(piece, *arguments, **options) for piece in flat.split(_PIECE)]
            return torch.cat(pieces).view(x.shape)
        quantum = _quantum(threads) if threads <= _FEW_THREADS else _TURN
        if n % quantum == 0 and x.is_contiguous():
            return kernel(x, *arguments, **options)
        padded = x.new_ones(-(-n // quantum) * quantum)
        padded[:n] = x.reshape(-1)
        return kernel(padded, *arguments, **options)[:n].view(x.shape)

    return function


def in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Turn a function into the variant that writes into its argument."""

    def variant(x: torch.Tensor, *arguments, **options) -> torch.Tensor:
        return x.copy_(function(x, *arguments, **options))

    return variant


def leading(visible: torch.Tensor, operator: str) -> tuple[int, int]:
    """Find the run of keys that one sequence sees.

    Parameters
    ----------
    visible : Tensor of bool, shape (..., keys)
        For every query, which keys it sees.
    operator : str
        For the error's text.

    Returns
    -------
    first, stop : int
        The first key that any query sees, and the one behind the last; (0, 1) when none sees any.

    Raises
    ------
    NotInvariant
        When two queries begin at different keys, as in a sliding window, or one sees a key behind one that only others
        see, as an attention sink: then no blocks suit both.
    """
    queries = visible.reshape(-1, visible.shape[-1])
    queries = queries[queries.any(-1)]
    if not len(queries):
        return 0, 1
    firsts = queries.int().argmax(-1)
    first = int(firsts[0])
    if not bool((firsts == first).all()):
        raise NotInvariant(
            f"row_invariant() cannot align the keys of {operator} under a mask in which queries begin at different keys "
            "(a sliding window?): use a model or configuration with full attention"
        )
    if len(queries) > 1:
        # Of the keys that anybody sees.
        seen = queries[:, queries.any(0)]
        if bool((seen[:, 1:] & ~seen[:, :-1]).any()):
            raise NotInvariant(
                f"row_invariant() cannot align the keys of {operator} where queries see a key behind one that they do not "
                "see (an attention sink at the end, as in gpt-oss?): use a model without it"
            )
    return first, visible.shape[-1] - int(queries.any(0).flip(0).int().argmax())


def softmax(x: torch.Tensor, dim: int, half_to_float: bool, exp: Callable[[torch.Tensor], torch.Tensor]):
    """Take a softmax whose rows do not change with masked elements before or after their own.

    Parameters
    ----------
    x : Tensor
        Scores; ``(batch_size, heads, queries, keys)`` when they are attention's, or ``(batch_size * heads, queries, keys)``.
    dim : int
        Along which.
    half_to_float : bool
        Whether 16-bit scores give 32-bit probabilities.
    exp : callable
        The exponential to use.

    Returns
    -------
    probabilities : Tensor, shape of `x`
    skipped : list of int
        For every entry of the first dimension, how many leading keys no query sees.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = x.movedim(dim, -1).to(wide)
    skipped = [0] * (len(scores) if scores.dim() in (3, 4) else 0)
    # A single query, as in a decode step, sees all behind the first key that it sees.
    if skipped and (scores.shape[-2] > 1 or bool((scores[..., 0] < MASKED).any())):
        visible = scores >= MASKED
        if not bool(visible.all()):
            # In three dimensions it need not be attention's, so it is no reason to refuse anything.
            with contextlib.suppress(NotInvariant) if scores.dim() == 3 else contextlib.nullcontext():
                skipped = [leading(entry, "softmax")[0] for entry in visible]
    if any(skipped):
        out = torch.zeros_like(scores)
        for index, first in enumerate(skipped):
            out[index, ..., first:] = _softmax(scores[index, ..., first:], exp)
    else:
        out = _softmax(scores, exp)
    return out.to(wide if half_to_float else x.dtype).movedim(-1, dim), skipped


def _softmax(scores: torch.Tensor, exp: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    keys = scores.shape[-1]
    parts = exp(scores - scores.amax(-1, keepdim=True))
    blocks = parts.new_zeros(*parts.shape[:-1], -(-keys // _BLOCK) * _BLOCK)
    blocks[..., :keys] = parts
    sums = blocks.unflatten(-1, (-1, _BLOCK)).sum(-1)
    total = sums[..., 0]
    for block in sums.unbind(-1)[1:]:
        total = total + block
    return parts / total[..., None]


def exponential_on(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Give the exponential for a tensor's device.

    On a GPU what a vectorised loop leaves over runs the same function, compiled once more; that it has the same bits there is
    not tried.
    """
    return base("aten::exp", "CUDA") if key_of(x) == "CUDA" else pointwise("aten::exp")


def make_softmax(remember: Callable[[list[int], torch.Size], None]) -> Callable[..., torch.Tensor]:
    """Give `softmax` as a kernel.

    Parameters
    ----------
    remember : callable
        Told of leading keys that were left out, for the product with the values that follows.
    """

    def function(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out, skipped = softmax(x, dim, half_to_float, exponential_on(x))
        remember(skipped, out.shape if out.dim() == 4 else torch.Size((*out.shape[:1], 1, *out.shape[1:])))
        return out

    return function
