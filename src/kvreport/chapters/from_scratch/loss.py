"""How well each way predicts held-out text, by how far it has read: teacher-forced loss in nats a character.

Every way reads the same texts from their first character on, and is scored at the same places, so that two ways are compared
place by place.  Rows, one a (way, sample, bucket of lengths): see ``data/README.md``.
"""

import itertools

import torch
from torch.nn import functional

from kvbook import progress
from kvbook.runs import records
from kvreport.chapters.from_scratch import subject
from kvreport.chapters.from_scratch.gpt.paths import FIXES, WAYS, MakeWay, Refill, Way, refill_name
from kvreport.chapters.from_scratch.settings import ScratchSettings

# A way without a memory costs a whole window for each place, so only so many places of a block are scored.
PLACES_IN_BLOCK = 8
# Texts that are read side by side.
_BATCH = 32


def hops(block: int) -> list[int]:
    """List the hops of the refilled cache that are tried: an eighth, a quarter, half of a block, and all of it."""
    return sorted({max(1, block // part) for part in (8, 4, 2, 1)})


def ways(block: int) -> dict[str, MakeWay]:
    """List every way that is scored."""
    refills = {refill_name(hop): lambda model, hop=hop: Refill(model, hop) for hop in hops(block)}
    return WAYS | FIXES | refills


def bucket_ends(block: int, n_blocks: int) -> list[int]:
    """Give the ends of the buckets in characters: half a block, one, two, four, ... blocks."""
    ends = [block // 2, block]
    while ends[-1] < n_blocks * block:
        ends.append(min(2 * ends[-1], n_blocks * block))
    return ends


def places(block: int, n_blocks: int, seed: int) -> list[int]:
    """Draw the lengths of text behind which the next character is scored: in each half block as many as in any other.

    They are drawn and not spaced evenly: a way that does something every few characters must not be met in one phase only.
    """
    generator = torch.Generator().manual_seed(seed)
    half, each = block // 2, min(PLACES_IN_BLOCK // 2, block // 2)
    return [
        start + 1 + place
        for start in range(0, n_blocks * block, half)
        for place in sorted(torch.randperm(half, generator=generator)[:each].tolist())
    ]


def nats_at(way: Way, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Score a way at some places.

    Parameters
    ----------
    way : Way
        A fresh one.
    ids : Tensor of int64, shape (batch_size, n_characters)
        Texts, one character longer than the last place.
    lengths : list of int
        Ascending; behind so many characters the next one is scored.

    Returns
    -------
    Tensor of float64, shape (batch_size, len(lengths))
        Negative log likelihood in nats.
    """
    found, scored = [], set(lengths)
    for length in range(1, lengths[-1] + 1):
        if way.remembers or length in scored:
            logits = way.read(ids[:, :length])
            if length in scored:
                found.append(functional.cross_entropy(logits.double(), ids[:, length], reduction="none"))
    return torch.stack(found, 1).cpu()


def run(settings: ScratchSettings) -> records.Run:
    """Measure the losses, or read them if these inputs have been measured.

    Raises
    ------
    UserError
        For settings that cannot be run; nothing is left behind.
    """
    fields = {"dtypes", "n_samples"}
    return subject.recorded("scratch_loss", __name__, settings, lambda writer: _measure(settings, writer), fields)


def _measure(settings: ScratchSettings, writer: records.Writer) -> None:
    loaded = subject.load(settings, settings.dtypes[0])
    model, block = loaded.model, loaded.model.shape.block
    samples = subject.texts(settings, loaded.vocabulary, block)
    lengths, ends = places(block, settings.n_blocks, settings.seed), bucket_ends(block, settings.n_blocks)
    at = torch.tensor(lengths)
    batches = [samples[first : first + _BATCH] for first in range(0, len(samples), _BATCH)]
    work = list(itertools.product(enumerate(batches), ways(block).items()))
    for (number, some), (name, make) in progress.track(work, len(work), "loss: way"):
        if (unit := f"{name}|{number}") in writer.done:
            continue
        with torch.inference_mode():
            nats = nats_at(make(model), subject.ids_of(some, model.characters.weight.device), lengths)
        rows = []
        for sample, of_sample in zip(some, nats, strict=True):
            for begin, end in zip([0, *ends], ends, strict=False):
                inside = of_sample[(at > begin) & (at <= end)]
                rows.append(
                    {
                        "way": name,
                        "dtype": settings.dtypes[0],
                        "sample": sample.index,
                        "source": sample.source,
                        "start": sample.start,
                        "block": block,
                        "read_from": begin,
                        "read_to": end,
                        "n_scored": len(inside),
                        "nats": inside.mean().item(),
                    }
                )
        writer.append(unit, rows)
