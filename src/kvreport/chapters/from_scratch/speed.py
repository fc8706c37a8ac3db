"""What a cache saves, by length, and what it costs to be right past the block; all ways side by side in one run.

Three things are timed: single steps by length, a whole run as long as the reply's, and the steps past the block.  The
first two also for a model of the reply's own size, whose weights are random: its speed does not depend on them.  Rows,
one a (model, measure, way, length, repetition): see ``data/README.md``.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kvbook.measuring import timing
from kvbook.models import placement
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvreport.chapters.from_scratch import loss, rows, subject, texts
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT, Shape
from kvreport.chapters.from_scratch.gpt.paths import MakeReader, Reply, Rolling, Window, refills, write
from kvreport.chapters.from_scratch.settings import ScratchSettings

# What the reply states: 6 layers of width 384, 4 heads, block 256, GPT-2's vocabulary, one block of positions.
REPLYS_SHAPE = Shape(vocabulary_size=50257, layers=6, width=384, heads=4, block=256, table=256)
# Steps of which one repetition takes the median, where a step is short.
SHORT_STEPS = 11


def lengths(block: int) -> list[int]:
    """List the lengths at which single steps are timed: up to a block, each twice the one before."""
    return [block // part for part in (16, 8, 4, 2, 1) if block // part > 1]


# A prompt needs the mask; the step that is timed is one character and has none, as posted.
_CACHED = partial(Rolling, prompt="whole", mask="causal")
_STEPPING: dict[str, MakeReader] = {
    rows.POSTED: _CACHED, rows.WINDOW: Window, rows.ALL_ROWS: partial(Window, all_rows=True),
}


def _step_seconds(make: MakeReader, model: ScratchGPT, ids: torch.Tensor, times: int) -> float:
    seconds = []
    for _ in range(times):
        way = make(model)
        if way.remembers and ids.shape[1] > 1:
            way.read(ids[:, :-1])
        seconds.append(timing.timed(partial(way.read, ids), ids.device)[1])
    return statistics.median(seconds)


def _run_seconds(make: MakeReader, model: ScratchGPT, ids: torch.Tensor) -> float:
    return timing.timed(lambda: write(make(model), ids, rows.REPLYS_NEW_TOKENS), ids.device)[1]


def _past_seconds(make: MakeReader, model: ScratchGPT, ids: torch.Tensor) -> float:
    block = model.shape.block
    way = make(model)
    way.read(ids[:, :block])

    def read_on() -> None:
        for length in range(block + 1, 2 * block + 1):
            way.read(ids[:, :length])

    return timing.timed(read_on, ids.device)[1]


def past_ways(block: int) -> dict[str, MakeReader]:
    """List the ways that are timed past the block."""
    return {rows.WINDOW: Window, rows.POSTED: _CACHED, rows.REPLY: Reply} | refills(*loss.hops(block))


def _random_model(settings: ScratchSettings) -> ScratchGPT:
    device = placement.device_of(settings.device)
    torch.manual_seed(settings.seed)
    model = ScratchGPT(REPLYS_SHAPE).to(device, placement.dtype_on(settings.dtypes[0], device))
    return model.eval().requires_grad_(False)


def _timed(name: str, model: ScratchGPT, ids: torch.Tensor) -> Iterator[tuple[dict[str, Any], Callable[[], float]]]:
    """List what is timed of a model, each with what takes its time once."""
    # A step of the small model is so short that one hiccup would outweigh it.
    times = 1 if name == rows.REPLYS_MODEL else SHORT_STEPS
    for length in lengths(model.shape.block):
        for way, make in _STEPPING.items():
            step = partial(_step_seconds, make, model, ids[:, :length], times)
            yield {"measure": rows.STEP, "way": way, "length": length}, step
    if name == rows.REPLYS_MODEL:
        for way, make in _STEPPING.items():
            run = partial(_run_seconds, make, model, ids[:, : texts.PROMPT])
            yield {"measure": rows.RUN, "way": way, "length": rows.REPLYS_NEW_TOKENS}, run
    else:
        for way, make in past_ways(model.shape.block).items():
            past = partial(_past_seconds, make, model, ids)
            yield {"measure": rows.PAST, "way": way, "length": model.shape.block}, past


@torch.inference_mode()
def measure(settings: ScratchSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Time everything, one repetition after the other."""
    trained = subject.load(settings, settings.dtypes[0]).model
    generator = torch.Generator().manual_seed(settings.seed)
    timed = []
    for name, model in ((rows.TRAINED, trained), (rows.REPLYS_MODEL, _random_model(settings))):
        shape = model.shape
        ids = torch.randint(0, shape.vocabulary_size, (1, 2 * shape.block), generator=generator).to(model.device)
        about = {"model": name, "dtype": settings.dtypes[0]}
        timed += [(about | what, take) for what, take in _timed(name, model, ids)]
    repetitions = {str(repetition): repetition for repetition in range(-1, settings.n_timed)}
    for unit, repetition in writer.pending(repetitions, "speed: repetition"):
        # An order that turns, so that a machine whose speed wanders favours none.
        turn = repetition % len(timed)
        ordered = timed[turn:] + timed[:turn]
        if repetition < 0:
            # It fills allocators and kernel caches; a long run does that within itself.
            for _ in (take() for what, take in ordered if what["measure"] == rows.STEP):
                pass
        else:
            times = [what | {"repetition": repetition, "seconds": take()} for what, take in ordered]
            writer.append(unit, times)


EXPERIMENT = Experiment(
    "scratch_speed", ScratchSettings, subject.inputs, measure, fields=subject.FIELDS | {"n_timed"}, timed=True
)
