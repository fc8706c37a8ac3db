"""The ways to read a text one character after the other: side by side, in the same words, different where the idea is.

A way is asked for the logits behind a text that grows by one character from call to call.  `Window` looks at the text
alone; the others remember what they were shown.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from kvbook.measuring import choosing
from kvreport.chapters.from_scratch.gpt.memory import FillingMemory, Keeping, RollingMemory
from kvreport.chapters.from_scratch.gpt.model import Mask, ScratchGPT


class Reader(Protocol):
    """A way to read a text that grows.

    Attributes
    ----------
    remembers : bool
        Whether a call builds on the calls before it; if not, calls may be left out.
    """

    remembers: bool

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Score what follows a text."""
        ...


class Window:
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
        Score behind every character of the window and use one row of it, as both posts do; it costs time alone.
    """

    remembers = False

    def __init__(
        self, model: ScratchGPT, positions: Literal["from 0", "absolute", "modulo"] = "from 0", hop: int = 1,
        all_rows: bool = False,
    ) -> None:
        self.model, self.positions, self.hop, self.all_rows = model, positions, hop, all_rows

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Reader.read`."""
        block = self.model.shape.block
        # Rounded up to whole hops.
        start = -(-max(0, ids.shape[1] - block) // self.hop) * self.hop
        fed = ids[:, start:]
        positions = torch.arange(fed.shape[1], device=ids.device)
        if self.positions != "from 0":
            positions = positions + start
        if self.positions == "modulo":
            positions = positions % block
        return self.model(fed, positions, last_only=not self.all_rows)[:, -1]


class Rolling:
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

    remembers = True

    def __init__(
        self, model: ScratchGPT, positions: Literal["absolute", "modulo", "forgotten"] = "absolute",
        prompt: Literal["last", "whole"] = "last", keeping: Keeping = "roll", mask: Mask = "none",
    ) -> None:
        self.model, self.positions, self.prompt = model, positions, prompt
        self.memory = RollingMemory(model.shape.block, keeping, mask)
        self._fed = 0

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Reader.read`."""
        fed = ids if self.prompt == "whole" and not self._fed else ids[:, -1:]
        positions = self._fed + torch.arange(fed.shape[1], device=ids.device)
        if self.positions == "modulo":
            positions = positions % self.model.shape.block
        elif self.positions == "forgotten":
            positions = positions - self._fed
        self._fed += fed.shape[1]
        return self.model(fed, positions, self.memory, last_only=True)[:, 0]


class Reply:
    """The reply's cache: the prompt, then one character a step; what no longer fits empties it.

    Its loop cuts the text to one block when it outgrows it and takes the position from the length of what is left, so
    from then on every character gets the last position of the table.

    Parameters
    ----------
    model : ScratchGPT
        The model; of its table of positions only the first block is used.
    """

    remembers = True

    def __init__(self, model: ScratchGPT) -> None:
        self.model = model
        self.memory = FillingMemory(model.shape.block)
        self._started = False

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Reader.read`; the first text must fit into a block."""
        fed = ids[:, -1:] if self._started else ids
        last = min(ids.shape[1], self.model.shape.block)
        self._started = True
        positions = torch.arange(last - fed.shape[1], last, device=ids.device)
        return self.model(fed, positions, self.memory, last_only=True)[:, 0]


class Refill:
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

    remembers = True

    def __init__(self, model: ScratchGPT, hop: int) -> None:
        self.model, self.hop = model, hop
        self.memory = RollingMemory(model.shape.block)
        self._held = 0

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Reader.read`; the first text must fit into a block."""
        block = self.model.shape.block
        if self._held == block:
            self.memory, self._held = RollingMemory(block), 0
            fed = ids[:, -(block - self.hop + 1) :]
        else:
            fed = ids[:, -1:] if self._held else ids
        positions = torch.arange(self._held, self._held + fed.shape[1], device=ids.device)
        self._held += fed.shape[1]
        return self.model(fed, positions, self.memory, last_only=True)[:, 0]


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

POSTED = "posted cache"
WINDOW = "window"
# What each of the reply's four points changes in the posted cache, one at a time.
FIXES: dict[str, MakeReader] = {
    "1 append, no roll": lambda model: Rolling(model, keeping="cat"),
    "2 explicit mask": lambda model: Rolling(model, mask="explicit"),
    "3 whole prompt": lambda model: Rolling(model, prompt="whole", mask="causal"),
    "4 positions modulo block": lambda model: Rolling(model, positions="modulo"),
}
WAYS: dict[str, MakeReader] = {
    WINDOW: Window,
    "window, absolute positions": lambda model: Window(model, "absolute"),
    POSTED: Rolling,
    "reply's cache": Reply,
    "offset forgotten": lambda model: Rolling(model, positions="forgotten"),
}


def refill_name(hop: int) -> str:
    """Name `Refill` with a hop, for rows and figures."""
    return f"refill, hop {hop}"
