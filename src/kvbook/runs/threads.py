"""A process's share of the cores, when another chapter is executed at the same time."""

import contextlib
import os
from collections.abc import Iterator

# How many threads a process may use unless it measures time; whoever runs chapters side by side sets it.
THREADS_VARIABLE = "KVBOOK_THREADS"

# How many torch had before it was held to the share.
_all = 0


def share(whole: bool) -> contextlib.AbstractContextManager[None]:
    """Hold torch to as many threads as ``KVBOOK_THREADS`` says, from here on; while `whole` is open it has them all.

    What a notebook computes after its experiments is held to them too: beside a process that kept one of two cores
    busy, two threads took four times as long as one in a trial.
    """
    global _all
    import torch

    if not (asked := os.environ.get(THREADS_VARIABLE)):
        return contextlib.nullcontext()
    _all = max(_all, torch.get_num_threads())
    if whole:
        return using(_all)
    torch.set_num_threads(min(int(asked), _all))
    return contextlib.nullcontext()


@contextlib.contextmanager
def using(count: int) -> Iterator[None]:
    """Let torch use so many threads of the CPU while this is open: the whole process, so not safe in threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
