"""What a number was measured on: hardware, versions, threads, commit."""

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from kvbook import __version__, paths

# With these a person chooses which kernels a library may take, and so changes bits and times.
_LIMITS = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
)  # fmt: skip
_OPENBLAS_LIMIT = "OPENBLAS_CORETYPE"


def _processor() -> str:
    """Name the processor, with what the environment lets libraries use of it: less of it is another kind of processor."""
    # Machines set this one for NumPy's library; it matters only where torch multiplies with OpenBLAS, too.
    limits = (*_LIMITS, _OPENBLAS_LIMIT) if "BLAS_INFO=open" in torch.__config__.show() else _LIMITS
    return ", ".join([_model(), *(f"{name}={os.environ[name]}" for name in limits if os.environ.get(name))])


def _model() -> str:
    """Name the processor as the system does."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def commit() -> str:
    """Give the checkout's commit, with ``+`` behind it when tracked files differ from it; ``unknown`` without git.

    Recorded runs and the manifest that cites them change no row, and do not count.
    """
    records = (paths.RECORDED_RUNS, paths.EVIDENCE)
    beside = [f":(exclude){path.relative_to(paths.ROOT)}" for path in records if path.is_relative_to(paths.ROOT)]
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=paths.ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", *beside],
            cwd=paths.ROOT, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def device_name(device: str) -> str:
    """Name the hardware behind a torch device string, as its maker does."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    if kind == "cpu":
        threads = torch.get_num_threads()
        return f"{_processor()}, {threads} thread{'s' * (threads > 1)}"
    return device


def describe(device: str) -> dict[str, str | int]:
    """Give everything about the machine that a bit of the result may depend on, and nothing that names its owner."""
    about: dict[str, str | int] = {
        "device": device,
        "device_name": device_name(device),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Not by importing it, which takes a second that whoever draws a chapter would wait.
        "transformers": importlib.metadata.version("transformers"),
        "kvbook": __version__,
    }
    if torch.device(device).type == "cuda":
        about["cuda"] = torch.version.cuda or "unknown"
    return about
