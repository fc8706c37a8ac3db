"""What a decode step's time is made of: kernels, calls of graphs and Python, and reading weights and cache from memory.

The profiler of torch tells how long each call of a compiled graph takes, and how long dynamo, which looks the graph up,
and its wrappers take around it.  Its own cost is in what it sees, so the step is timed without it too.

A step reads every weight once, whatever the batch, and each sequence's keys and values.  How fast this machine reads
memory bounds it: three kernels over arrays far larger than any cache, in the manner of the STREAM benchmark (McCalpin,
1995): a sum and a dot product, which only read, and a copy, whose writes count as well.  The bytes are those that the
kernel must move.  Each runs on usual and, where the system has them, on large pages of memory.

When reading the cache takes longer than reading the weights: steps of the stock model by dtype, batch and context.  The
cache is static and filled with random numbers, which take as long to read as a text's.

Rows, one a (pages, repeat, part), one a (kernel, pages, repeat), and one a (dtype, batch, context, step): see
``data/README.md``.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, StaticCache

from kvbook import progress
from kvbook.measuring import decoding, large_pages, memory, timing
from kvbook.models import loading, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.static_cache import FIELDS, StaticCacheSettings, subject
from kvreport.chapters.static_cache.rows import BATCHES, CALLS, KERNELS_OF_HEAD, KERNELS_OF_LAYERS, PROFILED, STEP

# What the profiler calls a compiled graph's kernels, and what stands around them.
_KERNELS = "## Call CompiledFxGraph"
_AROUND = ("TorchDynamo Cache Lookup", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher Runtime Wrapper")
_FIRST_STEPS = 3
_STEPS = 20
# Elements of fp32: 256 MiB an array.
_N = 1 << 26
_REPEATS = 10
DTYPES = ("float32", "float16", "bfloat16")
# Steps of each, the first left out.
_TIMED = 11


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


def inputs_of_bandwidth(settings: StaticCacheSettings) -> Inputs:
    """Refuse a device that is not there."""
    placement.device_of(settings.device)
    return {}


def on_large_pages() -> torch.Tensor:
    """Make an array on large pages."""
    return large_pages.empty(4 * _N).view(torch.float32).fill_(1)


def reading(place: Callable[[], torch.Tensor]) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the kernels over two arrays, and the bytes that each must move."""
    first, second = place(), place()
    return {
        "sum": (first.sum, first.nbytes),
        "dot": (functools.partial(torch.dot, first, second), first.nbytes + second.nbytes),
        "copy": (functools.partial(second.copy_, first), first.nbytes + second.nbytes),
    }


def read(device: torch.device) -> Rows:
    """Time every kernel."""
    places = {"usual": lambda: torch.ones(_N, device=device)}
    if device.type == "cpu" and large_pages.asked_for():
        places["large"] = on_large_pages
    for pages, place in places.items():
        kernels = reading(place)
        for repeat in progress.track(range(_REPEATS), label=f"memory bandwidth, {pages} pages: repeat"):
            for kernel, (work, n_bytes) in kernels.items():
                _, seconds = timing.timed(work, device)
                yield {"kernel": kernel, "pages": pages, "repeat": repeat, "n_bytes": n_bytes, "seconds": seconds}


def measure_bandwidth(settings: StaticCacheSettings, _made_of: Inputs, writer: Writer) -> None:
    """Append all rows as one unit."""
    if "all" not in writer.done:
        writer.append("all", read(placement.device_of(settings.device)))


BANDWIDTH = Experiment(
    "memory_bandwidth", StaticCacheSettings, inputs_of_bandwidth, measure_bandwidth, fields=frozenset({"device"}),
    revision=2, timed=True,
)


def inputs_of_contexts(settings: StaticCacheSettings) -> Inputs | None:
    """Name the model, and refuse a dtype that the device has not; None where no context is asked for."""
    if not settings.contexts:
        return None
    placement.check(settings.device, DTYPES)
    return subject.inputs(settings)


def measure_contexts(settings: StaticCacheSettings, made_of: Inputs, writer: Writer) -> None:
    """Time some steps at each dtype, batch and context; a dtype is a unit."""
    most = made_of["models"][0]["context_length"] or max(settings.contexts) + _TIMED
    contexts = sorted({min(context, most - _TIMED) for context in settings.contexts})
    for dtype, _ in writer.pending(dict.fromkeys(DTYPES), "weights or cache: dtype"):
        loaded = subject.load(settings.model_copy(update={"dtype": dtype}))
        weights_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
        per_token = memory.kv_bytes_per_token(loaded.model.config, loaded.model.dtype)
        cells = list(itertools.product(BATCHES, contexts))
        writer.keep(dtype, loaded.about, (
            {
                "batch": batch, "context": context, "step": step, "seconds": seconds,
                "weights_bytes": weights_bytes, "kv_bytes": batch * context * per_token,
            }
            for batch, context in progress.track(cells, label="batch and context")
            for step, seconds in enumerate(_steps(loaded.model, batch, context))
        ))


def _steps(model: PreTrainedModel, batch: int, context: int) -> list[float]:
    """Time steps that attend to so many tokens, the first left out."""
    cache = StaticCache(config=model.config, max_cache_len=context + _TIMED)
    token = torch.full((batch, 1), 3, device=model.device)
    # Makes the tensors.
    model(token, past_key_values=cache)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(context - 1)
    times = [
        timing.timed(lambda: model(token, past_key_values=cache, logits_to_keep=1), model.device)[1]
        for _ in range(_TIMED)
    ]
    return times[1:]


def work_of_contexts(settings: StaticCacheSettings) -> Work:
    """Count the steps; a batch counts as its sequences."""
    return Work(max(settings.contexts, default=1), 0, len(settings.contexts) * sum(BATCHES) * (_TIMED + 1), DTYPES)


CONTEXTS = Experiment(
    "weights_or_cache", StaticCacheSettings, inputs_of_contexts, measure_contexts, FIELDS - {"dtype"} | {"contexts"},
    timed=True, work=work_of_contexts,
)
