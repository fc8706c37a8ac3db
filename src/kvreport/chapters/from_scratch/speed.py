"""What a cache saves, by length, and what it costs to be right past the block; all ways side by side in one run.

Three things are timed: single steps by length, a whole run as long as the reply's, and the steps past the block.  The
first two also for a model of the reply's own size, whose weights are random: its speed does not depend on them.  Rows,
one a (model, measure, way, length, repetition): see ``data/README.md``.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from kvbook import progress
from kvbook.measuring import timing
from kvbook.models import placement
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvreport.chapters.from_scratch import loss, subject, texts
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT, Shape
from kvreport.chapters.from_scratch.gpt.paths import (
    POSTED,
    WINDOW,
    Reader,
    Refill,
    Reply,
    Rolling,
    Window,
    refill_name,
    write,
)
from kvreport.chapters.from_scratch.settings import ScratchSettings

# What the reply states: 6 layers of width 384, 4 heads, block 256, GPT-2's vocabulary, one block of positions.
REPLYS_SHAPE = Shape(vocabulary_size=50257, layers=6, width=384, heads=4, block=256, table=256)
REPLYS_MODEL = "reply's size"
REPLYS_NEW_TOKENS = 50
# Steps of which one repetition takes the median, where a step is short.
SHORT_STEPS = 11
ALL_ROWS = "window, all rows of logits"

TRAINED = "trained"
STEP, RUN, PAST = "step", "run", "past the block"


def lengths(block: int) -> list[int]:
    """List the lengths at which single steps are timed: up to a block, each twice the one before."""
    return [block // part for part in (16, 8, 4, 2, 1) if block // part > 1]


def _cached(model: ScratchGPT) -> Rolling:
    # A prompt needs the mask; the step that is timed is one character and has none, as posted.
    return Rolling(model, prompt="whole", mask="causal")


_STEPPING: dict[str, Callable[[ScratchGPT], Reader]] = {
    POSTED: _cached,
    WINDOW: Window,
    ALL_ROWS: lambda model: Window(model, all_rows=True),
}


def _step_seconds(make: Callable[[ScratchGPT], Reader], model: ScratchGPT, ids: torch.Tensor, times: int) -> float:
    seconds = []
    for _ in range(times):
        way = make(model)
        if way.remembers and ids.shape[1] > 1:
            way.read(ids[:, :-1])
        seconds.append(timing.timed(functools.partial(way.read, ids), ids.device)[1])
    return statistics.median(seconds)


def _run_seconds(make: Callable[[ScratchGPT], Reader], model: ScratchGPT, ids: torch.Tensor, n_new: int) -> float:
    return timing.timed(lambda: write(make(model), ids, n_new), ids.device)[1]


def _past_seconds(make: Callable[[ScratchGPT], Reader], model: ScratchGPT, ids: torch.Tensor) -> float:
    block = model.shape.block
    way = make(model)
    way.read(ids[:, :block])

    def read_on() -> None:
        for length in range(block + 1, 2 * block + 1):
            way.read(ids[:, :length])

    return timing.timed(read_on, ids.device)[1]


def past_ways(block: int) -> dict[str, Callable[[ScratchGPT], Reader]]:
    """List the ways that are timed past the block."""
    refills = {refill_name(hop): lambda model, hop=hop: Refill(model, hop) for hop in loss.hops(block)}
    return {WINDOW: Window, POSTED: _cached, "reply's cache": Reply} | refills


def _random_model(settings: ScratchSettings) -> ScratchGPT:
    device = placement.device_of(settings.device)
    torch.manual_seed(settings.seed)
    model = ScratchGPT(REPLYS_SHAPE).to(device, placement.dtype_on(settings.dtypes[0], device))
    return model.eval().requires_grad_(False)


def measure(settings: ScratchSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Time everything, one repetition after the other."""
    trained = subject.load(settings, settings.dtypes[0]).model
    models = {TRAINED: trained, REPLYS_MODEL: _random_model(settings)}
    generator = torch.Generator().manual_seed(settings.seed)
    device = trained.characters.weight.device
    timed: list[tuple[str, str, str, int, Callable[[], float]]] = []
    for name, model in models.items():
        shape = model.shape
        ids = torch.randint(0, shape.vocabulary_size, (1, 2 * shape.block), generator=generator).to(device)
        # A step of the small model is so short that one hiccup would outweigh it.
        times = 1 if name == REPLYS_MODEL else SHORT_STEPS
        for length in lengths(shape.block):
            timed += [
                (name, STEP, way, length, functools.partial(_step_seconds, make, model, ids[:, :length], times))
                for way, make in _STEPPING.items()
            ]
        if name == REPLYS_MODEL:
            prompt = ids[:, : texts.PROMPT]
            timed += [
                (name, RUN, way, REPLYS_NEW_TOKENS,
                 functools.partial(_run_seconds, make, model, prompt, REPLYS_NEW_TOKENS))
                for way, make in _STEPPING.items()
            ]
        else:
            timed += [
                (name, PAST, way, shape.block, functools.partial(_past_seconds, make, model, ids))
                for way, make in past_ways(shape.block).items()
            ]
    with torch.inference_mode():
        for repetition in progress.track(range(-1, settings.n_timed), settings.n_timed + 1, "speed: repetition"):
            if f"{repetition}" in writer.done:
                continue
            # An order that turns, so that a machine whose speed wanders favours none.
            turn = repetition % len(timed)
            rows = []
            for model, measure, way, length, take in timed[turn:] + timed[:turn]:
                # Repetition -1 fills allocators and kernel caches; a long run does that within itself.
                if repetition < 0 and measure != STEP:
                    continue
                rows.append(
                    {"model": model, "dtype": settings.dtypes[0], "measure": measure, "way": way, "length": length,
                     "repetition": repetition, "seconds": take()}
                )
            if repetition >= 0:
                writer.append(f"{repetition}", rows)


EXPERIMENT = Experiment(
    "scratch_speed", ScratchSettings, subject.inputs, measure, fields=subject.FIELDS | {"n_timed"}, timed=True
)
