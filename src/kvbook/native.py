"""Kernels of our own in C++, compiled where they are first wanted, in about three seconds, and kept."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w")
# By what torch says of the processor. Without fused multiplication and addition a kernel would be slow.
_FLAGS_FOR = {"AVX512": ("-mavx512f", "-mavx2", "-mfma", "-mf16c"), "AVX2": ("-mavx2", "-mfma", "-mf16c")}
_SECONDS = 120


def folder() -> Path:
    """Return the folder of this person's caches in which compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvbook", "kernels")


def compiler() -> str | None:
    """Find the compiler: the one that ``CXX`` names, or one that is there; an empty ``CXX`` means none."""
    names = (os.environ["CXX"],) if "CXX" in os.environ else ("c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Compile or load a source file; None where that cannot be done."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    instructions = _FLAGS_FOR.get(torch.backends.cpu.get_cpu_capability(), None if x86 else ())
    if instructions is None or not (found := compiler()):
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, found, [*_FLAGS, *instructions, *flags])))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(source: Path, compiler: str, flags: list[str]) -> Path:
    about = "\n".join([source.read_text("utf-8"), *flags, compiler, platform.machine()])
    path = folder() / f"{source.stem}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own and then renamed, so that nobody loads half a file.
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            out = Path(made, path.name)
            command = [compiler, *flags, str(source), "-o", str(out)]
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            out.replace(path)
    return path
