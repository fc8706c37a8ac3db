"""What a number was measured on: hardware, versions, threads, commit.

To ask for the commit or the processor takes no torch.
"""

import functools
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

from kvbook import __version__, paths
from kvbook.diagnosis import cores

# With these a person chooses which kernels a library may take, and so changes bits and times.
_LIMITS = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
)
_OPENBLAS_LIMIT = "OPENBLAS_CORETYPE"

UNKNOWN = "unknown"
# What Linux calls each on x86, and on Arm.
_IDENTITY = {
    "vendor": ("vendor_id", "CPU implementer"), "family": ("cpu family", "CPU architecture"),
    "model": ("model", "CPU part"), "stepping": ("stepping", "CPU revision"),
}
# The vector and matrix instructions from which a library chooses its kernels; a processor lists a hundred others.
_INSTRUCTIONS = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert",
    "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx10",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16", "sme",
)


def _processor() -> str:
    """Name the processor, and what the environment lets libraries use of it: less is another kind of processor."""
    limits = list(_LIMITS)
    if os.environ.get(_OPENBLAS_LIMIT):
        import torch

        # Machines set this one for NumPy's library; it matters only where torch multiplies with OpenBLAS, too.
        limits += [_OPENBLAS_LIMIT] * ("BLAS_INFO=open" in torch.__config__.show())
    model = _first_core(cores.cpuinfo()).get("model name") or platform.processor() or platform.machine()
    return ", ".join([model, *(f"{name}={os.environ[name]}" for name in limits if os.environ.get(name))])


def _first_core(cpuinfo: str) -> dict[str, str]:
    """Read the first core's fields; the cores of a server are alike."""
    lines = (line.partition(":") for line in cpuinfo.strip().partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def identity(cpuinfo: str) -> dict[str, Any]:
    """Read vendor, family, model, stepping and instruction sets from the text of ``/proc/cpuinfo``."""
    core = _first_core(cpuinfo)
    said = {field: next((core[name] for name in names if name in core), UNKNOWN) for field, names in _IDENTITY.items()}
    found: dict[str, Any] = {field: int(of) if of.isdecimal() else of for field, of in said.items()}
    has = set(core.get("flags", core.get("Features", "")).split())
    return found | {"instructions": [name for name in _INSTRUCTIONS if name in has]}


@functools.cache
def commit() -> str:
    """Return the checkout's commit, followed by ``+`` if tracked files differ from it; ``unknown`` without git.

    Recorded runs and the manifest that cites them change no row, and do not count.
    """
    records = (paths.RECORDED_RUNS, paths.EVIDENCE)
    left_out = [f":(exclude){path.relative_to(paths.ROOT)}" for path in records if path.is_relative_to(paths.ROOT)]
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *left_out)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout.strip()


def of_processor(threads: int) -> dict[str, Any]:
    """Describe this machine as one that computes on its processor; without torch, which takes a second to import."""
    processor = _processor()
    return {
        "device": "cpu", "device_name": f"{processor}, {threads} thread{'s' * (threads > 1)}", "processor": processor,
        "cpu": identity(cores.cpuinfo()), "threads": threads, "system": platform.system(),
        "python": platform.python_version(), "kvbook": __version__,
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def describe(device: str) -> dict[str, Any]:
    """Return everything about the machine that a bit of the result may depend on, and nothing that names its owner.

    ``processor`` tells kinds of processor apart. Makers give one name to several: ``cpu`` says which of them it was.
    """
    import torch

    about = of_processor(torch.get_num_threads())
    about |= {"device": device, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    kind = torch.device(device).type
    if kind == "cuda":
        # As its maker names the hardware.
        about |= {"device_name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda or UNKNOWN}
    elif kind != "cpu":
        about["device_name"] = device
    return about
