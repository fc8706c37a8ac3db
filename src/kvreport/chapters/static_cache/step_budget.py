"""Where a compiled decode step's time goes: kernels, calls of graphs, and the Python around them.

The profiler of torch tells how long each call of a compiled graph takes, and how long dynamo, which looks the graph up,
and its wrappers take around it.  Its own cost is in what it sees, so the step is timed without it too.  Rows, one a
(pages, repeat, part): see ``data/README.md``.
"""


import torch
from torch.profiler import ProfilerActivity, profile

from kvbook import progress
from kvbook.measuring import decoding, timing
from kvbook.models import loading
from kvbook.runs import Experiment, Inputs, Rows, Work
from kvreport.chapters.static_cache import StaticCacheSettings, subject
from kvreport.chapters.static_cache.rows import CALLS, KERNELS_OF_HEAD, KERNELS_OF_LAYERS, PROFILED, STEP

# What the profiler calls a compiled graph's kernels, and what stands around them.
_KERNELS = "## Call CompiledFxGraph"
_AROUND = ("TorchDynamo Cache Lookup", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher Runtime Wrapper")
_FIRST_STEPS = 3
_STEPS = 20


def inputs(settings: StaticCacheSettings) -> Inputs | None:
    """Name the model; None where it is compiled whole, for then there are no groups of layers to take apart."""
    return subject.inputs(settings) if settings.scope == "layer" else None


@subject.measured_at_once
def measure(settings: StaticCacheSettings, _: Inputs, loaded: loading.Loaded) -> Rows:
    """Take steps apart on usual and on large pages, by turns."""
    ids = subject.prompt(settings, loaded)
    room = ids.shape[1] + settings.n_new_tokens + _FIRST_STEPS + 2 * _STEPS
    ways = {
        pages: decoding.Decoder(loaded.model, decoding.Way("static", True, True, pages == "large"), room)
        for pages in ("usual", "large")
    }
    for repeat in progress.track(range(-1, settings.n_repeats), label="budget of a step: repeat"):
        for pages, decoder in ways.items():
            found = _taken_apart(decoder, ids, settings.n_new_tokens)
            # The first turn compiles.
            for part, seconds in found.items() if repeat >= 0 else ():
                yield {"pages": pages, "repeat": repeat, "part": part, "seconds": seconds}


def _taken_apart(decoder: decoding.Decoder, ids: torch.Tensor, n_new_tokens: int) -> dict[str, float]:
    """Return the seconds of a step's parts, means over some steps, in the middle of a text."""
    token = decoder.start(ids)
    for _ in range(max(_FIRST_STEPS, n_new_tokens // 2)):
        token = decoder.step(token)

    def some() -> None:
        nonlocal token
        for _ in range(_STEPS):
            token = decoder.step(token)

    _, plain = timing.timed(some, ids.device)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        _, profiled = timing.timed(some, ids.device)
    decoder.close()
    events = seen.key_averages()
    graphs = sorted((event for event in events if event.key.startswith(_KERNELS)), key=lambda event: event.count)
    # The head is called once a step, the layers once a group.
    seconds = {
        STEP: plain, PROFILED: profiled, KERNELS_OF_HEAD: 1e-6 * graphs[0].self_cpu_time_total,
        KERNELS_OF_LAYERS: 1e-6 * sum(event.self_cpu_time_total for event in graphs[1:]),
        CALLS: 1e-6 * sum(event.self_cpu_time_total for event in events if event.key.startswith(_AROUND)),
    }
    return {part: value / _STEPS for part, value in seconds.items()}


def work(settings: StaticCacheSettings) -> Work:
    """Count the steps of both ways."""
    steps = settings.n_new_tokens // 2 + 2 * _STEPS
    return Work(1, 0, 2 * (settings.n_repeats + 1) * steps, (settings.dtype,), copies=2)


EXPERIMENT = Experiment("step_budget", StaticCacheSettings, inputs, measure, timed=True, work=work)
