"""Time, read when the work is done.

A CUDA call returns before its kernel has run, so the clock is read only after the device is idle.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run a piece of work and give its result and its wall time in seconds."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start
