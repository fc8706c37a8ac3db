"""A model's weights on large pages of memory.

A program's addresses are translated page by page, and a processor keeps a few thousand translations at hand.  A decode
step reads every weight once: on Linux's usual pages of 4 KiB, 270 MB of weights are 66,000 pages, and nearly each must
be looked up again at every step.  On pages of 2 MiB they are 130.  Linux gives such pages to memory that asks for them
(`madvise` with ``MADV_HUGEPAGE``; "Transparent Hugepage Support" in the kernel's documentation).  torch does not ask.
"""

import itertools
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

# The size of a large page on x86-64 and, mostly, on 64-bit ARM.
PAGE = 1 << 21
# A tensor begins at the beginning of a line of the processor's caches.
_LINE = 64


def asked_for() -> bool:
    """Tell whether this system lets a program ask for large pages."""
    return hasattr(mmap, "MADV_HUGEPAGE")


def empty(n_bytes: int) -> torch.Tensor:
    """Take so many bytes of memory on large pages, from the beginning of one."""
    # Shared memory, which is the default, has a switch of its own that is mostly off.
    room = mmap.mmap(-1, n_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(room, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE
    return memory[first : first + n_bytes]


class LargePages:
    """Copies of a model's parameters in one piece of memory that asked for large pages.

    Its parameters stay where they are; as many bytes again are taken.  On another device than a CPU, and where a system
    does not take the question, there are no copies and nothing changes.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [each for each in model.parameters() if each.device.type == "cpu"] if asked_for() else []
        sizes = (-(-each.nbytes // _LINE) * _LINE for each in parameters)
        *starts, self.n_bytes = itertools.accumulate(sizes, initial=0)
        self._copies: list[tuple[nn.Parameter, torch.Tensor]] = []
        if not parameters:
            return
        # Tensors of inference mode could not take a parameter's place outside of it.
        with torch.inference_mode(False), torch.no_grad():
            memory = empty(self.n_bytes)
            for each, start in zip(parameters, starts, strict=True):
                copy = memory[start : start + each.nbytes].view(each.dtype).view(each.shape)
                self._copies.append((each, copy.copy_(each)))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the model compute with the copies while a ``with`` block lasts."""
        with ExitStack() as stack:
            for parameter, copy in self._copies:
                stack.callback(setattr, parameter, "data", parameter.data)
                parameter.data = copy
            yield
