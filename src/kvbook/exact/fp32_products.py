"""Products summed in fp32 by a kernel of our own, which adds every element up in one order: `fp32_products.cpp`.

A library adds up one row in several sums side by side and many rows in one, so no number of rows serves both.  This
kernel is as fast as either, and its error is that of several sums.  It is compiled where it is first wanted, in about
three seconds, and kept.  Without a compiler products run on row counts that the library grants, see `rows`: slower, and
with the larger error.

It takes matrices in fp32, and in 16 bits where the processor has no instructions for their products: there a library
takes one row fast and several slowly, so that a row that must have the bits of several takes twice its time.  For a
single row the matrix is read as one stream.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from kvbook import native
from kvbook.exact.kernels import cancel, draw

_SOURCE = Path(__file__).with_name("fp32_products.cpp")

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

# What the kernel is compiled for, by the matrix's dtype.
_ELEMENTS = {torch.float32: "Float", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
# The first instructions of a processor, in torch's words, and those that oneDNN may be held to, without products in 16
# bits.
_INSTRUCTIONS = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}
_LIMITS_WITHOUT = {torch.bfloat16: _WITHOUT_BF16, torch.float16: _WITHOUT_BF16 | {"AVX512_CORE_BF16"}}


@functools.cache
def slow_in_16_bits(dtype: torch.dtype) -> bool:
    """Tell whether this is an x86 processor without instructions for products in a dtype of 16 bits."""
    # Before 2.13 torch may not tell: then the library's products are taken.
    about = getattr(torch.cpu, "get_capabilities", dict)()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return "avx2" in about and (not about.get(_INSTRUCTIONS[dtype], False) or limit in _LIMITS_WITHOUT[dtype])


def kernel_for(weight: torch.Tensor) -> Kernel | None:
    """Return the kernel for products with a matrix; None where a library's is better, or none can be compiled."""
    dtype = weight.dtype
    wanted = dtype == torch.float32 or (dtype in _INSTRUCTIONS and slow_in_16_bits(dtype))
    return kernel(dtype) if wanted and weight.is_cpu else None


@functools.cache
def kernel(dtype: torch.dtype) -> Kernel | None:
    """Compile or load the kernel for a dtype; None where it cannot be compiled or does not hold."""
    made = native.library(_SOURCE, "-ffp-contract=off", f"-DELEMENT={_ELEMENTS[dtype]}")
    if made is None:
        return None
    times = _loaded(made, dtype)
    return times if holds(times, dtype) else None


def _loaded(made: ctypes.CDLL, dtype: torch.dtype) -> Kernel:
    function = made.kvbook_product
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, pointer, number, number, pointer, pointer, *[number] * 3, ctypes.c_int]
    function.restype = None

    def times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        (inner, columns), added = weight.shape, None
        if x.shape[-1] != inner or (bias is not None and bias.shape != (columns,)):
            # In torch's words, for it reads memory where they say.
            shapes = " and ".join("{}x{}".format(*each.shape) for each in (x.flatten(0, -2), weight))
            raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})")
        if not x.dtype == weight.dtype == dtype or (bias is not None and bias.dtype != dtype):
            dtypes = ", ".join(str(each.dtype) for each in (x, weight, bias) if each is not None)
            raise RuntimeError(f"mat1, mat2 and what is added must have the same dtype, but have {dtypes}")
        if bias is not None:
            bias = bias.contiguous()
            added = bias.data_ptr()
        x, out = x.contiguous(), x.new_empty(*x.shape[:-1], columns)
        function(x.data_ptr(), weight.data_ptr(), *weight.stride(), added, out.data_ptr(), x.numel() // inner, inner,
                 columns, torch.get_num_threads())
        return out

    return times


# More rows and columns than any tile of the kernel has, and inner sizes with and without a rest.
_ROWS, _COLUMNS, _INNER = 9, 17, (16, 45, 128)


def holds(times: Kernel, dtype: torch.dtype) -> bool:
    """Tell whether every element has the bits that it has by itself, in each place of each tile and both layouts."""
    for inner in _INNER:
        for numbers in (_telling(inner), (draw((_ROWS, inner), 5), draw((_COLUMNS, inner), 6))):
            x, weight = (each.to(dtype) for each in numbers)
            alone = torch.cat([times(row[None], column[:, None], None) for row in x for column in weight])
            alone = alone.view(_ROWS, _COLUMNS)
            for matrix in (weight.t(), weight.t().contiguous()):
                if not all(
                    torch.equal(times(x[:rows], matrix[:, :columns], None), alone[:rows, :columns])
                    for rows in range(1, _ROWS + 1) for columns in range(1, _COLUMNS + 1)
                ):
                    return False
    return True


def _telling(inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows and columns whose products sum to zero."""
    x, weight = draw((_ROWS, inner), 2, scale=16), draw((_COLUMNS, inner), 3, scale=16)
    cancel(x, weight, seed=1)
    return x, weight
