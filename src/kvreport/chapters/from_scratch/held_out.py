"""How well the model predicts by how many characters it holds: the same next characters, each from fewer or more before it.

A way that drops characters from its block is expected to predict worse.  Whether it does is for these rows to say.  Rows,
one a (sample, number of characters held): see ``data/README.md``.
"""

import torch
from torch.nn import functional

from kvbook import progress
from kvbook.runs import records
from kvreport.chapters.from_scratch import subject
from kvreport.chapters.from_scratch.loss import places
from kvreport.chapters.from_scratch.settings import ScratchSettings

_PARTS = 8


def held(block: int) -> list[int]:
    """List the numbers of characters that are tried: every eighth of a block."""
    return sorted({max(1, block * part // _PARTS) for part in range(1, _PARTS + 1)})


def run(settings: ScratchSettings) -> records.Run:
    """Measure the losses, or read them if these inputs have been measured.

    Raises
    ------
    UserError
        For settings that cannot be run; nothing is left behind.
    """
    fields = {"dtypes", "n_samples"}
    return subject.recorded("scratch_held", __name__, settings, lambda writer: _measure(settings, writer), fields)


def _measure(settings: ScratchSettings, writer: records.Writer) -> None:
    loaded = subject.load(settings, settings.dtypes[0])
    model, block = loaded.model, loaded.model.shape.block
    samples = subject.texts(settings, loaded.vocabulary, block)
    device = model.characters.weight.device
    lengths = torch.tensor([length for length in places(block, settings.n_blocks, settings.seed) if length >= block])
    for sample in progress.track(samples, len(samples), "characters held: text"):
        if (unit := str(sample.index)) in writer.done:
            continue
        ids = subject.ids_of([sample], device)[0]
        rows = []
        for count in held(block):
            # The last `count` characters before each scored one, shape (places, count).
            windows = ids[(lengths[:, None] - count + torch.arange(count)).to(device)]
            with torch.inference_mode():
                logits = model(windows, torch.arange(count, device=device), last_only=True)[:, 0]
                nats = functional.cross_entropy(logits.double(), ids[lengths.to(device)])
            rows.append(
                {
                    "dtype": settings.dtypes[0], "sample": sample.index, "source": sample.source, "start": sample.start,
                    "block": block, "held": count, "n_scored": len(lengths), "nats": nats.item(),
                }
            )  # fmt: skip
        writer.append(unit, rows)
