"""How well each way predicts held-out text, by how far it has read: teacher-forced loss in nats a character.

Every way reads the same texts from their first character on, and is scored at the same places, so that two ways are
compared place by place.  Beside it: how well the model predicts the same characters from fewer or more before each.  A
way that drops characters from its block is expected to predict worse; whether it does is for these rows to say.

A last experiment lets each way write: greedily from a short prompt, as the reply tests its code, and sampled, as the
thread writes.

Rows, one a (way, sample, bucket of lengths), one a (sample, number of characters held), and one a (choice, way,
sample): see ``data/README.md``.
"""

import itertools
from functools import partial

import torch
from torch.nn import functional

from kvbook.runs import Experiment, Inputs, Writer
from kvreport.chapters.from_scratch import ScratchSettings, subject
from kvreport.chapters.from_scratch.gpt.paths import FIXES, WAYS, MakeReader, Reader, Window, refills, write
from kvreport.chapters.from_scratch.rows import FORGOTTEN, POSTED, REPLY, REPLYS_WINDOW, WINDOW

# A way without a memory costs a whole window for each place, so only so many places of a block are scored.
PLACES_IN_BLOCK = 8
# Texts that are read side by side.
_BATCH = 32
# So many numbers of characters held are tried, evenly up to a block.
_PARTS = 8
# By our count, the tokens of the reply's prompt; here as many characters.
PROMPT = 13
# Texts that each way writes, and their length in blocks.
N_TEXTS, BLOCKS = 4, 3


def hops(block: int) -> list[int]:
    """List the hops of the refilled cache that are tried: an eighth, a quarter, half of a block, and all of it."""
    return sorted({max(1, block // part) for part in (8, 4, 2, 1)})


def ways(block: int) -> dict[str, MakeReader]:
    """List every way that is scored."""
    return WAYS | FIXES | refills(*hops(block))


def bucket_ends(block: int, n_blocks: int) -> list[int]:
    """List the ends of the buckets in characters: half a block, one, two, four, ... blocks."""
    ends = [block // 2, block]
    while ends[-1] < n_blocks * block:
        ends.append(min(2 * ends[-1], n_blocks * block))
    return ends


def places(block: int, n_blocks: int, seed: int) -> list[int]:
    """Draw the lengths of text after which the next character is scored: in each half block as many as in any other.

    They are drawn and not spaced evenly: a way that does something every few characters must not be met in one phase
    only.
    """
    generator = torch.Generator().manual_seed(seed)
    half, each = block // 2, min(PLACES_IN_BLOCK // 2, block // 2)
    return [
        start + 1 + place for start in range(0, n_blocks * block, half)
        for place in sorted(torch.randperm(half, generator=generator)[:each].tolist())
    ]


@torch.inference_mode()
def nats_at(way: Reader, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Score a way at some places."""
    found, scored = [], set(lengths)
    for length in range(1, lengths[-1] + 1):
        if way.remembers or length in scored:
            logits = way.read(ids[:, :length])
            if length in scored:
                found.append(functional.cross_entropy(logits.double(), ids[:, length], reduction="none"))
    return torch.stack(found, 1).cpu()


def measure(settings: ScratchSettings, _made_of: Inputs, writer: Writer) -> None:
    """Score every way on every text at the same places."""
    model, block, _, samples = subject.load_with_texts(settings, settings.dtypes[0])
    lengths, ends = places(block, settings.n_blocks, settings.seed), bucket_ends(block, settings.n_blocks)
    at = torch.tensor(lengths)
    batches = [samples[first : first + _BATCH] for first in range(0, len(samples), _BATCH)]
    units = {
        f"{name}|{number}": (some, name, make)
        for number, some in enumerate(batches) for name, make in ways(block).items()
    }
    for unit, (some, name, make) in writer.pending(units, "loss: way"):
        rows, nats = [], nats_at(make(model), subject.ids_of(some, model.device), lengths)
        for sample, of_sample in zip(some, nats, strict=True):
            about = {"way": name, **subject.about(settings, sample), "block": block}
            for begin, end in itertools.pairwise([0, *ends]):
                inside = of_sample[(at > begin) & (at <= end)]
                place = {"read_from": begin, "read_to": end, "n_scored": len(inside)}
                rows.append(about | place | {"nats": inside.mean().item()})
        writer.append(unit, rows)


def held(block: int) -> list[int]:
    """List the numbers of characters that are tried: every eighth of a block."""
    return sorted({max(1, block * part // _PARTS) for part in range(1, _PARTS + 1)})


@torch.inference_mode()
def measure_held(settings: ScratchSettings, _made_of: Inputs, writer: Writer) -> None:
    """Score the same next characters, each from fewer or more before it."""
    model, block, _, samples = subject.load_with_texts(settings, settings.dtypes[0])
    lengths = torch.tensor([length for length in places(block, settings.n_blocks, settings.seed) if length >= block])
    for unit, sample in writer.pending({str(sample.index): sample for sample in samples}, "characters held: text"):
        ids, rows = subject.ids_of([sample], model.device)[0], []
        for count in held(block):
            # The last `count` characters before each scored one, shape (places, count).
            windows = ids[(lengths[:, None] - count + torch.arange(count)).to(model.device)]
            logits = model(windows, torch.arange(count, device=model.device), last_only=True)[:, 0]
            nats = functional.cross_entropy(logits.double(), ids[lengths.to(model.device)])
            about = {**subject.about(settings, sample), "block": block, "held": count, "n_scored": len(lengths)}
            rows.append(about | {"nats": nats.item()})
        writer.append(unit, rows)


EXPERIMENT = Experiment("scratch_loss", ScratchSettings, subject.inputs, measure, fields=subject.FIELDS)
HELD = Experiment("scratch_held", ScratchSettings, subject.inputs, measure_held, fields=subject.FIELDS)


def ways_to_write(block: int) -> dict[str, MakeReader]:
    """List the ways that write."""
    return {
        WINDOW: WAYS[WINDOW], POSTED: WAYS[POSTED], REPLYS_WINDOW: partial(Window, positions="modulo"),
        REPLY: WAYS[REPLY], FORGOTTEN: WAYS[FORGOTTEN], **refills(block // 2),
    }


def measure_texts(settings: ScratchSettings, _made_of: Inputs, writer: Writer) -> None:
    """Let every way write, greedily and sampled."""
    model, block, vocabulary, samples = subject.load_with_texts(settings, settings.dtypes[0])
    prompts = subject.ids_of(samples[:N_TEXTS], model.device)[:, : min(PROMPT, block // 2)]
    total = min(BLOCKS, settings.n_blocks) * block
    draws = torch.rand(total, generator=torch.Generator().manual_seed(settings.seed))
    made = ways_to_write(block).items()
    units = {f"{choice}|{name}": (choice, name, make) for choice in ("greedy", "drawn") for name, make in made}
    for unit, (choice, name, make) in writer.pending(units, "texts: way"):
        # The thread starts from one character, the reply from a prompt.
        start = prompts if choice == "greedy" else prompts[:, :1]
        with torch.inference_mode():
            written = write(make(model), start, total - start.shape[1], None if choice == "greedy" else draws)
        writer.keep(unit, {"choice": choice, "way": name, "dtype": settings.dtypes[0]}, (
            {"sample": sample.index, "source": sample.source, "block": block, "n_prompt": start.shape[1],
             "text": vocabulary.decode(ids.tolist())}
            for sample, ids in zip(samples[:N_TEXTS], written, strict=True)
        ))


TEXTS = Experiment("scratch_texts", ScratchSettings, subject.inputs, measure_texts, fields=subject.FIELDS)
