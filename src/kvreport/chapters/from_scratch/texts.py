"""What each way writes: greedily from a short prompt, as the reply tests its code, and sampled, as the thread writes.

Rows, one a (choice, way, sample): see ``data/README.md``.
"""

from functools import partial

import torch

from kvbook.runs import Experiment, Inputs, Writer
from kvreport.chapters.from_scratch import subject
from kvreport.chapters.from_scratch.gpt.paths import WAYS, MakeReader, Window, refills, write
from kvreport.chapters.from_scratch.rows import FORGOTTEN, POSTED, REPLY, REPLYS_WINDOW, WINDOW
from kvreport.chapters.from_scratch.settings import ScratchSettings

# By our count, the tokens of the reply's prompt; here as many characters.
PROMPT = 13
# Texts of each way, and their length in blocks.
N_TEXTS, BLOCKS = 4, 3


def ways(block: int) -> dict[str, MakeReader]:
    """List the ways that write."""
    return {
        WINDOW: WAYS[WINDOW], POSTED: WAYS[POSTED], REPLYS_WINDOW: partial(Window, positions="modulo"),
        REPLY: WAYS[REPLY], FORGOTTEN: WAYS[FORGOTTEN], **refills(block // 2),
    }


def measure(settings: ScratchSettings, _made_of: Inputs, writer: Writer) -> None:
    """Let every way write, greedily and sampled."""
    loaded = subject.load(settings, settings.dtypes[0])
    model, block = loaded.model, loaded.model.shape.block
    samples = subject.texts(settings, loaded.vocabulary, block)[:N_TEXTS]
    prompts = subject.ids_of(samples, model.device)[:, : min(PROMPT, block // 2)]
    total = min(BLOCKS, settings.n_blocks) * block
    draws = torch.rand(total, generator=torch.Generator().manual_seed(settings.seed))
    made = ways(block).items()
    units = {f"{choice}|{name}": (choice, name, make) for choice in ("greedy", "drawn") for name, make in made}
    for unit, (choice, name, make) in writer.pending(units, "texts: way"):
        # The thread starts from one character, the reply from a prompt.
        start = prompts if choice == "greedy" else prompts[:, :1]
        with torch.inference_mode():
            written = write(make(model), start, total - start.shape[1], None if choice == "greedy" else draws)
        writer.keep(unit, {"choice": choice, "way": name, "dtype": settings.dtypes[0]}, (
            {"sample": sample.index, "source": sample.source, "block": block, "n_prompt": start.shape[1],
             "text": loaded.vocabulary.decode(ids.tolist())}
            for sample, ids in zip(samples, written, strict=True)
        ))


EXPERIMENT = Experiment("scratch_texts", ScratchSettings, subject.inputs, measure, fields=subject.FIELDS)
