"""Products summed in fp32 by a kernel of our own, which adds every element up in one order: `fp32_products.cpp`.

A library adds up one row in several sums side by side and many rows in one, so no number of rows serves both.  This
kernel is as fast as either, and its error is that of several sums.  It is compiled where it is first wanted, in about
three seconds, and kept.  Without a compiler products run on row counts that the library grants, see `rows`: slower, and
with the larger error.

It takes matrices in fp32, and in 16 bits where the processor has no instructions for their products: there a library
takes one row fast and several slowly, so that a row that must have the bits of several takes twice its time.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kvbook.exact.kernels import cancel, draw

_SOURCE = Path(__file__).with_name("fp32_products.cpp")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-w")
# By what torch says of the processor. Without fused multiplication and addition the kernel would be slow.
_FLAGS_FOR = {"AVX512": ("-mavx512f", "-mavx2", "-mfma", "-mf16c"), "AVX2": ("-mavx2", "-mfma", "-mf16c")}
_SECONDS = 120

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


def folder() -> Path:
    """Return the folder of this person's caches in which compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvbook", "kernels")


def compiler() -> str | None:
    """Find the compiler: the one that ``CXX`` names, or one that is there; an empty ``CXX`` means none."""
    named = os.environ.get("CXX")
    names = ("c++", "g++", "clang++") if named is None else (named,)
    return next((path for name in names if name and (path := shutil.which(name))), None)


@functools.cache
def kernel(dtype: torch.dtype) -> Kernel | None:
    """Compile or load the kernel for a dtype; None where it cannot be compiled or does not hold."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = _FLAGS_FOR.get(torch.backends.cpu.get_cpu_capability(), None if x86 else ())
    if flags is None or not (found := compiler()):
        return None
    try:
        times = _loaded(_compiled(found, [*_FLAGS, *flags, f"-DELEMENT={_ELEMENTS[dtype]}"]), dtype)
    except (OSError, subprocess.SubprocessError):
        return None
    return times if holds(times, dtype) else None


def _compiled(compiler: str, flags: list[str]) -> Path:
    about = "\n".join([_SOURCE.read_text("utf-8"), *flags, compiler, platform.machine()])
    path = folder() / f"fp32_products-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own and then renamed, so that nobody loads half a file.
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            out = Path(made, path.name)
            command = [compiler, *flags, str(_SOURCE), "-o", str(out)]
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            out.replace(path)
    return path


def _loaded(path: Path, dtype: torch.dtype) -> Kernel:
    function = ctypes.CDLL(str(path)).kvbook_product
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, number, pointer, number, number, pointer, pointer, *[number] * 3, ctypes.c_int]
    function.restype = None

    def times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[1] != weight.shape[0] or (bias is not None and bias.shape != weight.shape[1:]):
            # In torch's words, for it reads memory where they say.
            shapes = " and ".join("{}x{}".format(*each.shape) for each in (x, weight))
            raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})")
        if len(given := {each.dtype for each in (x, weight, bias) if each is not None} | {dtype}) > 1:
            dtypes = ", ".join(map(str, given))
            raise RuntimeError(f"mat1, mat2 and what is added must have the same dtype, but have {dtypes}")
        wide = x.float().contiguous()
        out = wide.new_empty(x.shape[0], weight.shape[1])
        bias = None if bias is None else bias.float().contiguous()
        added = None if bias is None else bias.data_ptr()
        function(wide.data_ptr(), wide.stride(0), weight.data_ptr(), *weight.stride(), added, out.data_ptr(),
                 *x.shape, weight.shape[1], torch.get_num_threads())
        return out.to(dtype)

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
                    for rows in range(1, _ROWS + 1)
                    for columns in range(1, _COLUMNS + 1)
                ):
                    return False
    return True


def _telling(inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows and columns whose products sum to zero."""
    x, weight = draw((_ROWS, inner), 2, scale=16), draw((_COLUMNS, inner), 3, scale=16)
    cancel(x, weight, seed=1)
    return x, weight
