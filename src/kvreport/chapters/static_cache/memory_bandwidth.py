"""How fast this machine reads memory: what bounds a decode step, which reads every weight once.

Three kernels over arrays far larger than any cache, in the manner of the STREAM benchmark (McCalpin, 1995): a sum and a
dot product, which only read, and a copy, whose writes count as well.  The bytes are those that the kernel must move.
Each runs on usual and, where the system has them, on large pages of memory.  Rows, one a (kernel, pages, repeat): see
``data/README.md``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from kvbook import progress
from kvbook.measuring import large_pages, timing
from kvbook.models import placement
from kvbook.runs import Experiment, Inputs, Rows, Writer
from kvreport.chapters.static_cache import StaticCacheSettings

# Elements of fp32: 256 MiB an array.
_N = 1 << 26
_REPEATS = 10


def inputs(settings: StaticCacheSettings) -> Inputs:
    """Refuse a device that is not there."""
    placement.device_of(settings.device)
    return {}


def on_large_pages() -> torch.Tensor:
    """Make an array on large pages."""
    return large_pages.empty(4 * _N).view(torch.float32).fill_(1)


def reading(place: Callable[[], torch.Tensor]) -> dict[str, tuple[Callable[[], Any], int]]:
    """Give the kernels over two arrays, and the bytes that each must move."""
    first, second = place(), place()
    return {
        "sum": (first.sum, first.nbytes),
        "dot": (functools.partial(torch.dot, first, second), first.nbytes + second.nbytes),
        "copy": (functools.partial(second.copy_, first), first.nbytes + second.nbytes),
    }


def read(device: torch.device) -> Rows:
    """Time every kernel."""
    places = {"usual": lambda: torch.ones(_N, device=device)}
    if device.type == "cpu" and large_pages.asked_for():
        places["large"] = on_large_pages
    for pages, place in places.items():
        kernels = reading(place)
        for repeat in progress.track(range(_REPEATS), label=f"memory bandwidth, {pages} pages: repeat"):
            for kernel, (work, n_bytes) in kernels.items():
                _, seconds = timing.timed(work, device)
                yield {"kernel": kernel, "pages": pages, "repeat": repeat, "n_bytes": n_bytes, "seconds": seconds}


def measure(settings: StaticCacheSettings, _made_of: Inputs, writer: Writer) -> None:
    """Append all rows as one unit."""
    if "all" not in writer.done:
        writer.append("all", read(placement.device_of(settings.device)))


EXPERIMENT = Experiment(
    "memory_bandwidth", StaticCacheSettings, inputs, measure, fields=frozenset({"device"}), revision=2, timed=True
)
