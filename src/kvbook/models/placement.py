"""Whether a model can be where it is asked to be: devices, dtypes, and the memory that it will take."""

import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch

from kvbook import UserError, refusing

# Activations, the allocator's slack and the cache come on top of the weights; a prediction that ignored them would let
# the kernel's out-of-memory killer answer instead of us.
_HEADROOM = 1.15
_LESS = "a 16-bit dtype or quantization"

DeviceMap = dict[str, torch.device] | Literal["auto"]


def device_of(name: str) -> torch.device:
    """Turn a device's name into a device that is there."""
    with refusing(f"device {name!r} is not a torch device: use 'cpu', 'cuda', 'cuda:0' or 'mps'", RuntimeError):
        device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UserError(f"device {name!r}: this machine has {count} CUDA devices, counted from 0; use one or 'cpu'")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps': not available on this machine; use device='cpu'")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"device {name!r} is not supported: use 'cpu', 'cuda', 'cuda:0' or 'mps'")
    return device


def dtype_on(name: str, device: torch.device) -> torch.dtype:
    """Turn a dtype's name into a dtype that the device computes with."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"dtype {name!r} is not a floating-point dtype: use float32, float16, bfloat16 or float64")
    lacks = f"device {str(device)!r} has no {name} arithmetic: leave {name} out of the dtypes"
    with refusing(lacks, RuntimeError, TypeError):
        if device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise RuntimeError
        # The matrix product is the operation that a device may lack.
        probe = torch.ones(2, 2, dtype=dtype, device=device)
        probe @ probe
    return dtype


def check(device: str, dtypes: Iterable[str]) -> torch.device:
    """Turn a device's name into a device that is there and computes with these dtypes."""
    there = device_of(device)
    for dtype in dtypes:
        dtype_on(dtype, there)
    return there


def free_bytes(device: torch.device) -> int:
    """Return the memory that can still be had on a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (available := re.search(r"^MemAvailable:\s+(\d+)", meminfo.read_text(), re.MULTILINE)):
        return min(int(available[1]) * 1024, _cgroup_room())
    # Windows has no such call: there a load that does not fit fails by itself.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62


def _cgroup_room() -> int:
    """What a container's own limit leaves; without a limit, more than any machine has."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return int(limit) - used if limit != "max" else 1 << 62
    except (OSError, ValueError):
        return 1 << 62


def missing(*libraries: str) -> list[str]:
    """List those of some libraries that are not there."""
    return [library for library in libraries if importlib.util.find_spec(library) is None]


def need(what: str, *libraries: str, otherwise: str = "") -> None:
    """Refuse what takes libraries of which one is not installed."""
    if absent := missing(*libraries):
        raise UserError(f"{what} takes {' and '.join(absent)}: pip install {' '.join(absent)}{otherwise}")


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"


def check_memory(what: str, n_bytes: float, device: torch.device) -> None:
    """Refuse a load that cannot fit, before it starts."""
    needed, free = n_bytes * _HEADROOM, free_bytes(device)
    if needed > free:
        remedy = "choose a smaller model, a 16-bit dtype, quantization, or another device"
        raise UserError(f"{what} needs about {_gib(needed)} and {device} has {_gib(free)} free: {remedy}")


def device_map(what: str, n_bytes: float, device: torch.device) -> DeviceMap:
    """Decide where weights that are read from files will lie."""
    needed = n_bytes * _HEADROOM
    if device.type != "cuda" or device.index is not None or needed <= free_bytes(device):
        check_memory(what, n_bytes, device)
        return {"": device}
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    free = sum(map(free_bytes, gpus)) + free_bytes(torch.device("cpu"))
    if needed > free:
        has = f"all GPUs and the host together have {_gib(free)} free"
        raise UserError(f"{what} needs about {_gib(needed)}; {has}: choose a smaller model, {_LESS}")
    # transformers spreads weights with it.
    if missing("accelerate"):
        has = f"{device} has {_gib(free_bytes(device))} free"
        spread = "pip install accelerate, which spreads it over all GPUs and the host"
        raise UserError(f"{what} needs about {_gib(needed)} and {has}: {spread}, or choose {_LESS}")
    return "auto"
