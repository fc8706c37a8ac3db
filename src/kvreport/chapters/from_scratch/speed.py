"""What a cache saves, by length, and what it costs to be right past the block; all ways side by side in one run.

Three things are timed: single steps by length, a whole run as long as the reply's, and the steps past the block.  The
first two also for a model of the reply's own size, whose weights are random: its speed does not depend on them.  Rows,
one a (model, measure, way, length, repetition): see ``data/README.md``.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvbook.measuring import timing
from kvbook.models import placement
from kvbook.runs import Experiment, Inputs, Row, Writer
from kvreport.chapters.from_scratch import ScratchSettings, loss, rows, subject
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT, Shape
from kvreport.chapters.from_scratch.gpt.paths import MakeReader, Reader, Reply, Rolling, Window, refills, write

# What the reply states: 6 layers of width 384, 4 heads, block 256, GPT-2's vocabulary, one block of positions.
REPLYS_SHAPE = Shape(vocabulary_size=50257, layers=6, width=384, heads=4, block=256, table=256)
# Steps of which one repetition takes the median, where a step is short.
SHORT_STEPS = 11


def lengths(block: int) -> list[int]:
    """List the lengths at which single steps are timed: up to a block, each twice the one before."""
    return [block // part for part in (16, 8, 4, 2, 1) if block // part > 1]


# A prompt needs the mask; the step that is timed is one character and has none, as posted.
_CACHED = partial(Rolling, prompt="whole", mask="causal")
# Takes a reader, ids and a length; gives seconds.
Take = Callable[[Reader, torch.Tensor, int], float]
_STEPPING: dict[str, MakeReader] = {
    rows.POSTED: _CACHED, rows.WINDOW: Window, rows.ALL_ROWS: partial(Window, all_rows=True),
}


def _step_seconds(way: Reader, ids: torch.Tensor, length: int) -> float:
    if way.remembers and length > 1:
        way.read(ids[:, : length - 1])
    return timing.timed(lambda: way.read(ids[:, :length]), ids.device)[1]


def _run_seconds(way: Reader, ids: torch.Tensor, length: int) -> float:
    return timing.timed(lambda: write(way, ids[:, : loss.PROMPT], length), ids.device)[1]


def _past_seconds(way: Reader, ids: torch.Tensor, block: int) -> float:
    way.read(ids[:, :block])
    return timing.timed(lambda: [way.read(ids[:, : block + further]) for further in range(1, block + 1)], ids.device)[1]


def _seconds(take: Take, make: MakeReader, model: ScratchGPT, ids: torch.Tensor, length: int, times: int) -> float:
    return statistics.median(take(make(model), ids, length) for _ in range(times))


def _random_model(settings: ScratchSettings) -> ScratchGPT:
    device = placement.device_of(settings.device)
    torch.manual_seed(settings.seed)
    model = ScratchGPT(REPLYS_SHAPE).to(device, placement.dtype_on(settings.dtypes[0], device))
    return model.eval().requires_grad_(False)


def _timed(name: str, model: ScratchGPT, ids: torch.Tensor, new: int) -> Iterator[tuple[Row, Callable[[], float]]]:
    """List what is timed of a model, each with what takes its time once; `new` tokens are a run's."""
    block, is_replys = model.shape.block, name == rows.REPLYS_MODEL
    todo = [(rows.STEP, _STEPPING, _step_seconds, length) for length in lengths(block)]
    past = {rows.WINDOW: Window, rows.POSTED: _CACHED, rows.REPLY: Reply} | refills(*loss.hops(block))
    todo.append(
        (rows.RUN, _STEPPING, _run_seconds, new) if is_replys else (rows.PAST, past, _past_seconds, block)
    )
    for what, ways, take, length in todo:
        # A step of the small model is so short that one hiccup would outweigh it.
        times = SHORT_STEPS if what == rows.STEP and not is_replys else 1
        for way, make in ways.items():
            about = {"measure": what, "way": way, "length": length}
            yield about, partial(_seconds, take, make, model, ids, length, times)


@torch.inference_mode()
def measure(settings: ScratchSettings, _made_of: Inputs, writer: Writer) -> None:
    """Time everything, one repetition after the other."""
    trained = subject.load(settings, settings.dtypes[0]).model
    generator, timed = torch.Generator().manual_seed(settings.seed), []
    for name, model in ((rows.TRAINED, trained), (rows.REPLYS_MODEL, _random_model(settings))):
        shape = model.shape
        ids = torch.randint(0, shape.vocabulary_size, (1, 2 * shape.block), generator=generator).to(model.device)
        about = {"model": name, "dtype": settings.dtypes[0]}
        timed += [(about | what, take) for what, take in _timed(name, model, ids, settings.n_new_tokens)]
    repetitions = {str(repetition): repetition for repetition in range(-1, settings.n_timed)}
    for unit, repetition in writer.pending(repetitions, "speed: repetition"):
        # An order that turns, so that a machine whose speed wanders favours none.
        turn = repetition % len(timed)
        # The first one fills allocators and kernel caches; a long run does that within itself.
        due = [one for one in timed[turn:] + timed[:turn] if repetition >= 0 or one[0]["measure"] == rows.STEP]
        times = [what | {"repetition": repetition, "seconds": take()} for what, take in due]
        if repetition >= 0:
            writer.append(unit, times)


EXPERIMENT = Experiment(
    "scratch_speed", ScratchSettings, subject.inputs, measure, subject.FIELDS | {"n_timed", "n_new_tokens"}, timed=True
)
