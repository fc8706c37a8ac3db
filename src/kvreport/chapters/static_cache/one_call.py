"""A step in one call beside the compiled one-row step and `generate`, on the same weights on large pages, by turns.

All write the same number of tokens after the same prompt, greedily.  Between them the kernels of `memory_bandwidth`
read memory: a step, which reads all weights and on average half of the cache, takes at least as long.  Rows, one a
(repeat, program): see ``data/README.md``.
"""


import numpy as np
import torch

from kvbook import native, progress
from kvbook.measuring import decoding, large_pages, memory, timing
from kvbook.measuring.one_call import OneCall, fits
from kvbook.models import loading
from kvbook.runs import Experiment, Inputs, Row, Rows, Work
from kvreport.chapters.static_cache import memory_bandwidth, subject
from kvreport.chapters.static_cache.rows import GENERATE, MEMORY, ONE_CALL, OURS
from kvreport.chapters.static_cache.settings import StaticCacheSettings

FASTEST = decoding.Way("static", True, True, True)
_FIRST_STEPS = 3
# The seconds of each step, and the tokens.
Timed = tuple[list[float], list[int]]


def inputs(settings: StaticCacheSettings) -> Inputs | None:
    """Name the model; None where there is no such step, or no compiler for it."""
    if settings.scope != "layer" or settings.device != "cpu" or settings.dtype != "bfloat16" or not native.compiler():
        return None
    config = loading.config_of(settings.model, subject.weights_of(settings))
    return subject.inputs(settings) if config.model_type == "llama" else None


@subject.measured_at_once
def measure(settings: StaticCacheSettings, _: Inputs, loaded: loading.Loaded) -> Rows:
    """Let all three decode by turns, with memory in between, and count the tokens that are the one-row step's."""
    if not fits(loaded.model):
        return
    ids, count = subject.prompt(settings, loaded), settings.n_new_tokens
    room = ids.shape[1] + count
    decoder, pages = decoding.Decoder(loaded.model, FASTEST, room), large_pages.LargePages(loaded.model)
    programs = {
        OURS: lambda: steps_of(decoder, ids, count), ONE_CALL: lambda: by_calls(loaded.model, room, pages, ids, count),
        GENERATE: lambda: _by_generate(loaded.model, ids, count),
    }
    kernels = memory_bandwidth.reading(memory_bandwidth.on_large_pages).values()
    per_token = sum(each.nbytes for each in loaded.model.parameters())
    per_token += memory.kv_bytes_per_token(loaded.model.config, loaded.model.dtype) * (ids.shape[1] + count / 2)
    for repeat in progress.track(range(-1, settings.n_repeats), label="a step in one call: repeat"):
        fastest = max(n_bytes / timing.timed(read, ids.device)[1] for read, n_bytes in kernels)
        least = {"n_steps": len(kernels), "step_s": per_token / fastest}
        rows, reference = [{"program": MEMORY} | least | {"equal": None, "tokens": None}], []
        for program, decode in programs.items():
            seconds, tokens = decode()
            reference = reference or tokens
            equal = sum(map(int.__eq__, tokens, reference))
            rows.append({"program": program} | in_the_middle(seconds) | {"equal": equal, "tokens": len(tokens)})
        # The first turn compiles, and warms caches up.
        if repeat >= 0:
            yield from ({"repeat": repeat} | row for row in rows)


def in_the_middle(seconds: list[float]) -> Row:
    """Return the number of steps after the first ones, and their median; of few steps all count."""
    steps = seconds[_FIRST_STEPS:] or seconds
    return {"n_steps": len(steps), "step_s": float(np.median(steps))}


def steps_of(decoder: decoding.Decoder | OneCall, ids: torch.Tensor, count: int) -> Timed:
    """Decode, and return the seconds of each step, and the tokens."""
    token, seconds, tokens = decoder.start(ids), [], []
    for _ in range(count):
        tokens.append(int(token))
        token, one = timing.timed(lambda token=token: decoder.step(token), ids.device)
        seconds.append(one)
    decoder.close()
    return seconds, tokens


def by_calls(model: torch.nn.Module, room: int, pages: large_pages.LargePages, ids: torch.Tensor, count: int) -> Timed:
    """Decode in one call a token, on large pages: the seconds of each step, and the tokens."""
    with pages.used():
        return steps_of(OneCall(model, room), ids, count)


def _by_generate(model: torch.nn.Module, ids: torch.Tensor, count: int) -> Timed:
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    written, seconds = timing.timed(lambda: model.generate(ids, **options), ids.device)
    # The prefill is one of its steps; in so long a text that is little.
    return [seconds / count], written[0, ids.shape[1] :].tolist()


def work(settings: StaticCacheSettings) -> Work:
    """Count the steps of all programs."""
    return Work(1, 0, 3 * (settings.n_repeats + 1) * settings.n_new_tokens, (settings.dtype,), copies=3)


EXPERIMENT = Experiment("one_call", StaticCacheSettings, inputs, measure, timed=True, work=work)
