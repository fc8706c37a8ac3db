"""Which keys each query sees, and where the blocks begin in which they are summed.

Keys are summed in blocks, one after the other.  A query's bits are its own if the blocks begin with the first key that
it sees and hold nothing but keys that it sees.  Where all queries begin at the same key and see all up to some last
one, as under a causal mask with or without padding on the left, one alignment serves all: the *run* of `run`.  Under a
sliding window, with an attention sink, or with chosen keys, every query's keys are drawn together first.
"""

from typing import NamedTuple

import torch

# A score as low as this is a mask's; attention's own scores are nowhere near it, fp16's mask is at -65,504.
MASKED = -3e4


class Seen(NamedTuple):
    """What the queries of a batch see.

    Attributes
    ----------
    skipped : tuple of int
        For every entry of the first dimension, how many leading keys no query sees; all zero where `visible` is given.
    visible : Tensor of bool, shape (..., queries, keys), or None
        Given where no one alignment serves all queries.
    """

    skipped: tuple[int, ...]
    visible: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether blocks begin with the first key for every query."""
        return self.visible is None and not any(self.skipped)

    def by_head(self, heads: int, keys: int) -> "Seen":
        """Say the same of every head of every entry, of so many keys: an attention sink after them is left out."""
        if self.visible is None:
            return Seen(tuple(first for first in self.skipped for _ in range(heads)))
        visible = self.visible.flatten(0, -3)[..., :keys]
        # A query that sees the sink alone.
        return Seen((0,) * len(visible), visible | ~visible.any(-1, keepdim=True))


def run(visible: torch.Tensor) -> tuple[int, int] | None:
    """Find the run of keys that serves all queries of one sequence."""
    queries = visible.reshape(-1, visible.shape[-1])
    if len(queries) == 1:
        seen = queries[0].nonzero()[:, 0]
        if not len(seen):
            return 0, 1
        first, last = int(seen[0]), int(seen[-1])
        return (first, last + 1) if len(seen) == last + 1 - first else None
    queries = queries[queries.any(-1)]
    if not len(queries):
        return 0, 1
    firsts = queries.int().argmax(-1)
    first = int(firsts[0])
    if not bool((firsts == first).all()):
        return None
    seen = queries[:, first:]
    if bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        return None
    return first, visible.shape[-1] - int(queries.any(0).flip(0).int().argmax())


def seen(scores: torch.Tensor) -> Seen:
    """Find out what queries see from the scores that a mask was added to; only attention's have 3 or 4 dimensions."""
    if scores.dim() not in (3, 4) or not scores.numel():
        return Seen(())
    nothing = Seen((0,) * len(scores))
    # A single query, as in a decode step without a mask, sees all there is.
    if scores.shape[-2] == 1 and not bool((scores < MASKED).any()):
        return nothing
    visible = scores >= MASKED
    if bool(visible.all()):
        return nothing
    runs = [run(entry) for entry in visible]
    if any(found is None for found in runs):
        # A query that sees nothing is padding: what it gives is of no use, but must be a number.
        return Seen(nothing.skipped, visible | ~visible.any(-1, keepdim=True))
    return Seen(tuple(found[0] for found in runs if found is not None))


def drawn_together(scores: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move every query's visible scores to the front, in their order."""
    places = visible.cumsum(-1) - 1
    most = int(places.amax()) + 1
    # What is not visible goes past the end, and is cut off.
    room = scores.new_full((*scores.shape[:-1], most + 1), float("-inf"))
    room.scatter_(-1, places.masked_fill(~visible, most), scores)
    room[..., most] = float("-inf")
    return room[..., :most], places.clamp(min=0)


def beginnings(visible: torch.Tensor) -> list[int | None]:
    """List the first key that each query sees, None where it does not see all up to its last one."""
    first = visible.int().argmax(-1)
    last = visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1)
    whole = visible.sum(-1) == last - first + 1
    return [begin if is_whole else None for begin, is_whole in zip(first.tolist(), whole.tolist(), strict=True)]


def alike(visible: torch.Tensor, block: int) -> list[tuple[torch.Tensor, torch.Tensor | int]]:
    """Group the queries of one head that can be multiplied with their values together."""
    groups: dict[object, list[int]] = {}
    for query, first in enumerate(beginnings(visible)):
        key = visible[query].numpy(force=True).tobytes() if first is None else first % block
        groups.setdefault(key, []).append(query)
    return [
        (torch.tensor(queries, device=visible.device),
         key if isinstance(key, int) else visible[queries[0]].nonzero()[:, 0])
        for key, queries in groups.items()
    ]
