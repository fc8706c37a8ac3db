"""How fast this machine reads memory: what bounds a decode step, which reads every weight once.

Three kernels over arrays far larger than any cache, in the manner of the STREAM benchmark (McCalpin, 1995): a sum and a dot
product, which only read, and a copy, whose writes count as well.  The bytes are those that the kernel must move.  Rows, one
a (kernel, repeat): see ``data/README.md``.
"""

from typing import Any

import torch

from kvbook import progress
from kvbook.measuring import timing
from kvbook.models import placement
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvreport.chapters.static_cache.settings import StaticCacheSettings

# Elements of fp32: 256 MiB an array.
_N = 1 << 26
_REPEATS = 5


def inputs(settings: StaticCacheSettings) -> dict[str, Any]:
    """Refuse a device that is not there."""
    placement.device_of(settings.device)
    return {}


def measure(device: torch.device, writer: records.Writer) -> None:
    """Time every kernel, and append all rows as one unit."""
    if "all" in writer.done:
        return
    first, second = torch.ones(_N, device=device), torch.ones(_N, device=device)
    kernels = {
        "sum": (lambda: first.sum(), first.nbytes),
        "dot": (lambda: torch.dot(first, second), first.nbytes + second.nbytes),
        "copy": (lambda: second.copy_(first), first.nbytes + second.nbytes),
    }
    rows = []
    for repeat in progress.track(range(_REPEATS), label="memory bandwidth: repeat"):
        for kernel, (work, n_bytes) in kernels.items():
            _, seconds = timing.timed(work, device)
            rows.append({"kernel": kernel, "repeat": repeat, "n_bytes": n_bytes, "seconds": seconds})
    writer.append("all", rows)


def _measure(settings: StaticCacheSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    measure(placement.device_of(settings.device), writer)


EXPERIMENT = Experiment(
    "memory_bandwidth", StaticCacheSettings, inputs, _measure, fields=frozenset({"device"}), timed=True
)
