"""Causal convolutions along a text, in which a position's bits do not depend on how many others come with it.

A convolution of one channel by itself, as state-space models have before their scan, is a sum of as many products as
the kernel has taps, added one after the other: no library is asked.  One across channels is a product of rows, a
position's window with the kernel as a matrix.
"""

import torch

from kvbook.exact import kernels, rows


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> torch.Tensor:
    """Stand in for ``aten::convolution``; the arguments are its own."""
    kernels.no_gradients("convolution", x, weight, bias)
    if x.dim() != 3 or weight.dim() != 3 or transposed or list(stride) != [1] or any(output_padding):
        what = f"aten::convolution of shape {tuple(x.shape)} with stride {list(stride)}"
        raise kernels.met(what, "it can do those along a text, with stride 1")
    columns, _, taps = weight.shape
    step = dilation[0]
    x = torch.constant_pad_nd(x, (padding[0], padding[0]))
    length = x.shape[2] - step * (taps - 1)
    windows = [x[:, :, tap * step : tap * step + length] for tap in range(taps)]
    if groups == x.shape[1] == columns:
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.zeros(x.shape[0], columns, length, dtype=wide, device=x.device)
        for tap, window in enumerate(windows):
            out = out + window.to(wide) * weight[:, 0, tap, None].to(wide)
        return _by_position((out if bias is None else out + bias[:, None].to(wide)).to(x.dtype))
    # Shape (batch_size, positions, channels, taps), and group by group.
    unfolded = torch.stack(windows, -1).transpose(1, 2)
    parts = [
        rows.product(part.flatten(2).flatten(0, 1), kernel.flatten(1).t()).view(len(x), length, -1)
        for part, kernel in zip(unfolded.chunk(groups, 2), weight.chunk(groups), strict=True)
    ]
    out = torch.cat(parts, -1).transpose(1, 2)
    return _by_position(out if bias is None else out + bias[:, None])


def _by_position(x: torch.Tensor) -> torch.Tensor:
    """Lay a position's channels out one after the other, as those of a single position are.

    What comes after a convolution, such as a norm, sums them along; where they are scattered, the order is another.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)
