"""How many threads a check takes: as many as there are idle cores, and none of them spins for long while it waits.

Two busy torch processes with a thread per core each slow one another twentyfold, because their idle threads spin.  A
check that never spins takes half as long again, because its passes of one token wake the threads for each product.
"""

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# What OpenMP reads when torch is imported; what a user has set stays.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# All or none: a user's own policy must not meet our count, of turns that a waiting thread takes before it sleeps.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "10000"}


def cpuinfo() -> str:
    """Read what Linux says of the processors; other systems have no such file."""
    return _CPUINFO.read_text("utf-8") if _CPUINFO.is_file() else ""


def physical(cpuinfo: str, logical: int) -> int:
    """Count the physical cores among the logical ones, which two threads of one core share."""
    listed = re.findall(r"physical id\s*:\s*(\d+).*?core id\s*:\s*(\d+)", cpuinfo, re.DOTALL)
    # Of the machine's logical processors a container may have but a few.
    return max(1, min(logical, round(logical * len(set(listed)) / len(listed)))) if listed else logical


def idle(cores: int, load: float) -> int:
    """Count the threads that leave other processes their cores: one at least."""
    return max(1, cores - round(load))


def usable() -> int:
    """Count the logical processors that this process may use."""
    # Both are missing from some systems.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_torch_counts() -> int:
    """Count the cores as torch counts its threads: what the user has set, else those that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else usable()


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        # Windows has none.
        return 0.0


def settle(environment: MutableMapping[str, str] = os.environ) -> None:
    """Choose the threads of a process that has not imported torch yet."""
    if not any(name in environment for name in _WAITING):
        environment.update(_WAITING)
    if not any(name in environment for name in _THREADS):
        environment["OMP_NUM_THREADS"] = str(idle(physical(cpuinfo(), usable()), _load()))
