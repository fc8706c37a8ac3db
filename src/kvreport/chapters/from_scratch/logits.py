"""The thread's cache against its uncached window, step by step: how far apart the logits are, in more than one dtype.

Pairs of ways read the same text one character at a time.  Beside them stand prompts of several characters, each way of
taking them in against one full pass.  Rows, one a (dtype, comparison, length): see ``data/README.md``.
"""

import functools
from functools import partial

import pandas as pd
import torch

from kvbook.measuring import agreement
from kvbook.runs import Experiment, Inputs, Row, Writer
from kvreport.chapters.from_scratch import ScratchSettings, rows, subject
from kvreport.chapters.from_scratch.gpt.memory import Mask, RollingMemory
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT
from kvreport.chapters.from_scratch.gpt.paths import FIXES, WAYS, MakeReader, Reader, Refill, Rolling, Window

# Steps are compared through so many blocks, or all of them where the settings have fewer.
BLOCKS = 3
# The mask with which the second of two chunks is taken in.
CHUNKS: dict[str, Mask] = {
    rows.CHUNKED_REPLY: "unshifted", rows.CHUNKED_SHIFTED: "causal", rows.CHUNKED_UNMASKED: "none",
}


def pairs(block: int) -> dict[str, tuple[MakeReader, MakeReader]]:
    """List the comparisons: each way with its reference.

    The posted cache and the ways that ought to agree with the window are compared with it; what the reply's points
    change, and the controls, with the posted cache; a refilled cache with the window whose start moves by the same hop.
    """
    hop = block // 2
    return {
        **{name: (WAYS[name], WAYS[rows.WINDOW]) for name in (rows.POSTED, rows.REPLY, rows.FORGOTTEN)},
        rows.REPLYS_OWN: (WAYS[rows.REPLY], partial(Window, positions="modulo")),
        rows.refill_name(hop): (partial(Refill, hop=hop), partial(Window, hop=hop)),
        **{name: (make, WAYS[rows.POSTED]) for name, make in FIXES.items()},
        rows.SHUFFLED: (partial(Rolling, keeping="shuffled"), WAYS[rows.POSTED]),
        rows.LATE: (partial(Rolling, keeping="values late"), WAYS[rows.POSTED]),
    }


def read_steps(way: Reader, ids: torch.Tensor) -> torch.Tensor:
    """Let a way read a text from its first character on."""
    return torch.stack([way.read(ids[:, : step + 1]) for step in range(ids.shape[1])])


def _differences(reference: torch.Tensor, other: torch.Tensor) -> list[Row]:
    drift = agreement.drift(reference.cpu(), other.cpu())
    flips = (reference.argmax(-1) != other.argmax(-1)).int()
    columns = {"max_abs": drift.max_abs, "relative_rms": drift.relative_rms, "top1_flip": flips}
    return pd.DataFrame({name: column.tolist() for name, column in columns.items()}).to_dict("records")


def read_prompt(model: ScratchGPT, ids: torch.Tensor, how: str) -> torch.Tensor:
    """Take in a prompt and score what follows it."""
    if how in (rows.LAST_ONLY, rows.WHOLE_PROMPT):
        return Rolling(model, prompt="last" if how == rows.LAST_ONLY else "whole", mask="causal").read(ids)
    memory = RollingMemory(model.shape.block, mask=CHUNKS[how])
    positions, half = torch.arange(ids.shape[1], device=ids.device), ids.shape[1] // 2
    for part in (slice(0, half), slice(half, None)):
        if ids[:, part].shape[1]:
            logits = model(ids[:, part], positions[part], memory, last_only=True)[:, 0]
    return logits


def prompt_lengths(block: int) -> list[int]:
    """List the prompts' lengths: the thread's one character, a few, and up to a block."""
    return sorted({1, 2, min(5, block), block // 4, block // 2, block} - {0})


def measure(settings: ScratchSettings, _made_of: Inputs, writer: Writer) -> None:
    """Compare every pair of ways step by step, and every way to take a prompt in, in each dtype."""
    for dtype in settings.dtypes:
        _measure_in(dtype, settings, writer)


@torch.inference_mode()
def _measure_in(dtype: str, settings: ScratchSettings, writer: Writer) -> None:
    model, block, _, (sample, *_) = subject.load_with_texts(settings, dtype)
    ids = subject.ids_of([sample], model.device)[:, : min(BLOCKS, settings.n_blocks) * block]
    about = {"dtype": dtype, "source": sample.source, "start": sample.start, "block": block}

    @functools.cache
    def logits_of(make: MakeReader) -> torch.Tensor:
        return read_steps(make(model), ids)[:, 0]

    compared = {f"{dtype}|{name}": (name, *ways) for name, ways in pairs(block).items()}
    for unit, (name, make, reference) in writer.pending(compared, f"logits, {dtype}: way"):
        found = _differences(logits_of(reference), logits_of(make))
        writer.append(unit, [about | {"comparison": name, "length": n} | row for n, row in enumerate(found, 1)])
    if (unit := f"{dtype}|prompts") not in writer.done:
        prompts = []
        for length in prompt_lengths(block):
            prompt = ids[:, :length]
            reference = model(prompt, torch.arange(length, device=model.device), last_only=True)[:, 0]
            for how in (rows.LAST_ONLY, rows.WHOLE_PROMPT, *CHUNKS):
                (row,) = _differences(reference, read_prompt(model, prompt, how))
                prompts.append(about | {"comparison": how, "length": length} | row)
        writer.append(unit, prompts)


EXPERIMENT = Experiment("scratch_logits", ScratchSettings, subject.inputs, measure, fields=subject.FIELDS)
