"""Sums along rows, for a device whose own change with the number of rows.

On a GPU torch shares a row out among the more threads the fewer rows there are (``set_block_dimension`` in its
``Reduce.cuh``), so the order of additions changes with the number of rows.  Its layer norm gives each row a block of
threads of its own, and the row's mean beside the result: one kernel for what is wanted.  Whether it does is tried bit
for bit on first use; where it does not, a row's elements are added in pairs, one addition of tensors after the other.
"""

import functools
from collections.abc import Sequence

import torch

from kvbook.exact.kernels import base, draw, key_of, met

# Numbers of rows at which a row's mean is compared with that among all of them.
_COUNTS = (1, 3, 16, 128)
_ROWS = 520
# Longer rows, such as a whole tensor's, are added in pairs: to try them would take more memory than they do.
_WIDEST = 65536


def _by_norm(x: torch.Tensor) -> torch.Tensor:
    # Far from zero, so that a row of equal elements divides by nothing small.
    return torch.native_layer_norm(x, x.shape[-1:], None, None, 1.0)[1]


@functools.cache
def _norm_holds(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether the layer norm's mean of a row has the same bits among any number of rows."""
    x = draw((_ROWS, width), seed=6).to(device, dtype)
    means = _by_norm(x)
    return all(torch.equal(torch.cat([_by_norm(part) for part in x.split(count)]), means) for count in _COUNTS)


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    x = torch.constant_pad_nd(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while (size := x.shape[-1]) > 1:
        x = x[..., : size // 2] + x[..., size // 2 :]
    return x[..., 0]


def _mean(rows: torch.Tensor) -> torch.Tensor:
    width = rows.shape[-1]
    if rows.dtype == torch.float32 and width <= _WIDEST and _norm_holds(width, rows.dtype, rows.device):
        return _by_norm(rows.reshape(-1, width)).view(rows.shape[:-1])
    return _in_pairs(rows) / width


def _sum(rows: torch.Tensor) -> torch.Tensor:
    width = rows.shape[-1]
    # A mean times a power of two is the sum: nothing is rounded.
    return _mean(rows) * width if not width & (width - 1) else _in_pairs(rows)


def _along(
    operator: str, x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    stock = base(operator, key_of(x))
    result = dtype or x.dtype
    if not (x.is_floating_point() and result.is_floating_point) or not x.dim() or not x.numel():
        return stock(x, dim, keepdim, dtype=dtype)
    dims = sorted(each % x.dim() for each in dim) if dim else list(range(x.dim()))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = wide.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
    out = (_mean if operator == "aten::mean.dim" else _sum)(rows).to(result)
    for each in dims if keepdim else ():
        out = out.unsqueeze(each)
    return out


# Stand in for these operators, with their arguments.
mean = functools.partial(_along, "aten::mean.dim")
total = functools.partial(_along, "aten::sum.dim_IntList")


def vector_norm(
    x: torch.Tensor, ord: float = 2, dim: list[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Stand in for ``aten::linalg_vector_norm``; the arguments are its own.

    Powers are added up along rows that lie one after the other in memory: where they are scattered, the order is
    another.
    """
    if ord not in (1, 2) or dim is None or not x.is_floating_point():
        raise met(f"aten::linalg_vector_norm of order {ord}", "it can do orders 1 and 2 along given dimensions")
    wide = x.to(torch.promote_types(dtype or x.dtype, torch.float32)).contiguous()
    found = wide.abs().sum(dim, keepdim=keepdim) if ord == 1 else (wide * wide).sum(dim, keepdim=keepdim).sqrt()
    return found.to(dtype or x.dtype)
