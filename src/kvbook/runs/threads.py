"""An experiment's share of the cores, when another chapter is executed at the same time."""

import contextlib
import os
from collections.abc import Iterator

# How many threads an experiment may use that measures no time; whoever runs chapters side by side sets it.
THREADS_VARIABLE = "KVBOOK_THREADS"


def share(whole: bool) -> contextlib.AbstractContextManager[None]:
    """Let torch use as many threads as ``KVBOOK_THREADS`` says, while this is open."""
    import torch

    asked = os.environ.get(THREADS_VARIABLE)
    return contextlib.nullcontext() if whole or not asked else using(min(int(asked), torch.get_num_threads()))


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
