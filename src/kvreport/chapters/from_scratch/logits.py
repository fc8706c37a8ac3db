"""The thread's cache against its uncached window, step by step: how far apart the logits are, in more than one dtype.

Pairs of ways read the same text one character at a time.  Beside them stand prompts of several characters, each way of
taking them in against one full pass.  Rows, one a (dtype, comparison, length): see ``data/README.md``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvbook import progress
from kvbook.measuring import agreement
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvreport.chapters.from_scratch import subject
from kvreport.chapters.from_scratch.gpt.memory import RollingMemory
from kvreport.chapters.from_scratch.gpt.model import Mask, ScratchGPT
from kvreport.chapters.from_scratch.gpt.paths import (
    FIXES,
    POSTED,
    WAYS,
    WINDOW,
    MakeReader,
    Reader,
    Refill,
    Rolling,
    Window,
    refill_name,
)
from kvreport.chapters.from_scratch.settings import ScratchSettings

# Steps are compared through so many blocks, or all of them where the settings have fewer.
BLOCKS = 3
SHUFFLED, LATE = "control: keys and values shuffled alike", "control: values one slot late"
REPLYS_OWN = "reply's cache, against its own window"

LAST_ONLY, WHOLE = "prompt: last character alone", "prompt: whole"
CHUNKS = {
    "prompt: two chunks, reply's mask": "unshifted",
    "prompt: two chunks, shifted mask": "causal",
    "prompt: two chunks, no mask": "none",
}


def pairs(block: int) -> dict[str, tuple[MakeReader, MakeReader]]:
    """List the comparisons: each way with its reference.

    The posted cache and the ways that ought to agree with the window are compared with it; what the reply's points
    change, and the controls, with the posted cache; a refilled cache with the window whose start moves by the same hop.
    """
    against_window = {name: (WAYS[name], WAYS[WINDOW]) for name in (POSTED, "reply's cache", "offset forgotten")}
    hop = block // 2
    return against_window | {
        REPLYS_OWN: (WAYS["reply's cache"], lambda model: Window(model, "modulo")),
        refill_name(hop): (lambda model: Refill(model, hop), lambda model: Window(model, hop=hop)),
        **{name: (make, WAYS[POSTED]) for name, make in FIXES.items()},
        SHUFFLED: (lambda model: Rolling(model, keeping="shuffled"), WAYS[POSTED]),
        LATE: (lambda model: Rolling(model, keeping="values late"), WAYS[POSTED]),
    }


def read_steps(way: Reader, ids: torch.Tensor) -> torch.Tensor:
    """Let a way read a text from its first character on."""
    return torch.stack([way.read(ids[:, : step + 1]) for step in range(ids.shape[1])])


def _differences(reference: torch.Tensor, other: torch.Tensor) -> Iterator[dict[str, Any]]:
    drift = agreement.drift(reference.cpu(), other.cpu())
    flips = (reference.argmax(-1) != other.argmax(-1)).cpu()
    for max_abs, relative, flip in zip(
        drift.max_abs.tolist(), drift.relative_rms.tolist(), flips.tolist(), strict=True
    ):
        yield {"max_abs": max_abs, "relative_rms": relative, "top1_flip": int(flip)}


def read_prompt(model: ScratchGPT, ids: torch.Tensor, how: str) -> torch.Tensor:
    """Take in a prompt and score what follows it."""
    if how in (LAST_ONLY, WHOLE):
        return Rolling(model, prompt="last" if how == LAST_ONLY else "whole", mask="causal").read(ids)
    mask: Mask = CHUNKS[how]
    memory = RollingMemory(model.shape.block, mask=mask)
    positions = torch.arange(ids.shape[1], device=ids.device)
    half = ids.shape[1] // 2
    for part in (slice(0, half), slice(half, None)):
        if ids[:, part].shape[1]:
            logits = model(ids[:, part], positions[part], memory, last_only=True)[:, 0]
    return logits


def prompt_lengths(block: int) -> list[int]:
    """List the prompts' lengths: the thread's one character, a few, and up to a block."""
    return sorted({1, 2, min(5, block), block // 4, block // 2, block} - {0})


def measure(settings: ScratchSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Compare every pair of ways step by step, and every way to take a prompt in, in each dtype."""
    for dtype in settings.dtypes:
        loaded = subject.load(settings, dtype)
        model, block = loaded.model, loaded.model.shape.block
        sample = subject.texts(settings, loaded.vocabulary, block)[0]
        device = model.characters.weight.device
        ids = subject.ids_of([sample], device)[:, : min(BLOCKS, settings.n_blocks) * block]
        about = {"dtype": dtype, "source": sample.source, "start": sample.start, "block": block}
        # References are read once.
        read: dict[MakeReader, torch.Tensor] = {}

        def logits_of(make: Callable[[ScratchGPT], Reader], model=model, ids=ids, read=read) -> torch.Tensor:
            if make not in read:
                read[make] = read_steps(make(model), ids)[:, 0]
            return read[make]

        with torch.inference_mode():
            compared = pairs(block)
            for name, (make, reference) in progress.track(compared.items(), len(compared), f"logits, {dtype}: way"):
                if (unit := f"{dtype}|{name}") in writer.done:
                    continue
                found = _differences(logits_of(reference), logits_of(make))
                writer.append(unit, [about | {"comparison": name, "length": n} | row for n, row in enumerate(found, 1)])
            if (unit := f"{dtype}|prompts") not in writer.done:
                rows = []
                for length in prompt_lengths(block):
                    prompt = ids[:, :length]
                    reference = model(prompt, torch.arange(length, device=device), last_only=True)[:, 0]
                    for how in (LAST_ONLY, WHOLE, *CHUNKS):
                        found = _differences(reference, read_prompt(model, prompt, how))
                        rows += [about | {"comparison": how, "length": length} | row for row in found]
                writer.append(unit, rows)


EXPERIMENT = Experiment("scratch_logits", ScratchSettings, subject.inputs, measure, fields=subject.FIELDS)
