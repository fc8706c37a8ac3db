"""The ways to read a text one character after the other: side by side, in the same words, different where the idea is.

A way is asked for the logits after a text that grows by one character from call to call.  `Window` looks at the text
alone; the others remember what they were shown.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from kvbook.measuring import choosing
from kvreport.chapters.from_scratch import rows
from kvreport.chapters.from_scratch.gpt.memory import Keeping, Mask, RollingMemory
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT

Places = Literal["from 0", "absolute", "modulo", "forgotten"]


class Reader:
    """A way to read a text that grows; each says what it feeds of a text, and at which positions.

    Parameters
    ----------
    model : ScratchGPT
        The model.

    Attributes
    ----------
    remembers : bool
        Whether a call builds on the calls before it; if not, calls may be left out.
    fed : int
        How many characters its memory was given.
    """

    remembers = True
    all_rows = False

    def __init__(self, model: ScratchGPT, memory: RollingMemory | None = None) -> None:
        self.model, self.memory, self.fed = model, memory, 0

    def feed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose what is fed of a text, and its positions."""
        raise NotImplementedError

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Score what follows a text; the first one must fit into a block."""
        fed, positions = self.feed(ids)
        self.fed += fed.shape[1]
        return self.model(fed, positions.to(ids.device), self.memory, last_only=not self.all_rows)[:, -1]


class Window(Reader):
    """No cache: the last block of characters is run anew at every step.

    Parameters
    ----------
    model : ScratchGPT
        The model.
    positions : {"from 0", "absolute", "modulo"}
        Of the window's characters: from 0 in every window, as the thread's uncached generation; where they stand in the
        text; or that modulo the block, as the reply's uncached generation.
    hop : int
        The window's start moves by so many characters at once; 1 keeps the window full.
    all_rows : bool
        Score after every character of the window and use one row of it, as both posts do; it costs time alone.
    """

    remembers = False

    def __init__(self, model: ScratchGPT, positions: Places = "from 0", hop: int = 1, all_rows: bool = False) -> None:
        super().__init__(model)
        self.positions, self.hop, self.all_rows = positions, hop, all_rows

    def feed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed what the window holds."""
        block, length = self.model.shape.block, ids.shape[1]
        # Rounded up to whole hops.
        start = -(-max(0, length - block) // self.hop) * self.hop
        positions = torch.arange(length - start) if self.positions == "from 0" else torch.arange(start, length)
        return ids[:, start:], positions % block if self.positions == "modulo" else positions


class Rolling(Reader):
    """The thread's cache: one character a step on top of the last block of keys and values.

    Parameters
    ----------
    model : ScratchGPT
        The model.
    positions : {"absolute", "modulo", "forgotten"}
        Of the character that is fed: how many were fed before it, as posted; that modulo the block; or always 0.
    prompt : {"last", "whole"}
        What is fed at the first call: the last character alone, as posted, or everything.
    keeping, mask
        As for `RollingMemory`.
    """

    def __init__(
        self, model: ScratchGPT, positions: Places = "absolute", prompt: Literal["last", "whole"] = "last",
        keeping: Keeping = "roll", mask: Mask = "none",
    ) -> None:
        super().__init__(model, RollingMemory(model.shape.block, keeping, mask))
        self.positions, self.prompt = positions, prompt

    def feed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed the last character, at first perhaps the prompt."""
        fed = ids if self.prompt == "whole" and not self.fed else ids[:, -1:]
        first = 0 if self.positions == "forgotten" else self.fed
        positions = torch.arange(first, first + fed.shape[1])
        return fed, positions % self.model.shape.block if self.positions == "modulo" else positions


class Reply(Reader):
    """The reply's cache: the prompt, then one character a step; what no longer fits empties it.

    Its loop cuts the text to one block when it outgrows it and takes the position from the length of what is left, so
    from then on every character gets the last position of the table.

    Parameters
    ----------
    model : ScratchGPT
        The model; of its table of positions only the first block is used.
    """

    def __init__(self, model: ScratchGPT) -> None:
        super().__init__(model, RollingMemory(model.shape.block, "emptied", mask="unshifted"))

    def feed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed the prompt, then the last character."""
        fed, last = ids[:, -1:] if self.fed else ids, min(ids.shape[1], self.model.shape.block)
        return fed, torch.arange(last - fed.shape[1], last)


class Refill(Reader):
    """A cache that stays right: when it is full, its newer part is run again from position 0 and it goes on from there.

    Whatever it holds was computed from what it holds, at the position that it has in the window, so it gives what
    ``Window(hop=hop)`` gives, up to rounding.  A pass over ``block - hop + 1`` characters comes once in `hop` steps.

    Parameters
    ----------
    model : ScratchGPT
        The model.
    hop : int
        How many of the oldest characters are dropped at a time, from 1 (no cache is left) to the block.
    """

    def __init__(self, model: ScratchGPT, hop: int) -> None:
        super().__init__(model, RollingMemory(model.shape.block))
        self.hop = hop

    def feed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed the prompt, then the last character; when the cache is full, what it keeps."""
        block, fed = self.model.shape.block, ids[:, -1:] if self.fed else ids
        if self.fed == block:
            self.memory, self.fed = RollingMemory(block), 0
            fed = ids[:, -(block - self.hop + 1) :]
        return fed, torch.arange(self.fed, self.fed + fed.shape[1])


def write(way: Reader, ids: torch.Tensor, n_new: int, draws: torch.Tensor | None = None) -> torch.Tensor:
    """Let a way write on."""
    for step in range(n_new):
        logits = way.read(ids)
        if draws is None:
            chosen = choosing.greedy(logits)
        else:
            passed = torch.softmax(logits.double(), -1).cumsum(-1) > draws[step].item()
            # The last sum may round to below 1.
            chosen = torch.where(passed.any(-1), passed.int().argmax(-1), logits.shape[-1] - 1)
        ids = torch.cat([ids, chosen[:, None]], 1)
    return ids


MakeReader = Callable[[ScratchGPT], Reader]

# What each of the reply's four points changes in the posted cache, one at a time.
FIXES: dict[str, MakeReader] = {
    rows.APPEND: partial(Rolling, keeping="cat"), rows.MASK: partial(Rolling, mask="explicit"),
    rows.PROMPT: partial(Rolling, prompt="whole", mask="causal"), rows.MODULO: partial(Rolling, positions="modulo"),
}
WAYS: dict[str, MakeReader] = {
    rows.WINDOW: Window, rows.ABSOLUTE: partial(Window, positions="absolute"), rows.POSTED: Rolling, rows.REPLY: Reply,
    rows.FORGOTTEN: partial(Rolling, positions="forgotten"),
}


def refills(*hops: int) -> dict[str, MakeReader]:
    """Name refilled caches by their hops."""
    return {rows.refill_name(hop): partial(Refill, hop=hop) for hop in hops}
