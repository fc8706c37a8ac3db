"""A step in one call beside the compiled one-row step and `generate`, on the same weights on large pages, by turns.

All write the same number of tokens after the same prompt, greedily.  Between them the kernels of `step_times`
read memory: a step, which reads all weights and on average half of the cache, takes at least as long.

A second experiment sets the fastest way of decoding, and a step in one call, beside llama.cpp.  llama.cpp is no
dependency of the book.  To measure, on a quiet machine::

    pip install llama-cpp-python
    python -m kvreport.chapters.static_cache.one_call

llama.cpp gets the weights in a GGUF file that is written for the purpose; a step is one token, its logits and the
largest of them.  Rows of both, one a (repeat, program): see ``data/README.md``.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvbook import UserError, native, progress, refusing
from kvbook.measuring import decoding, large_pages, memory, timing
from kvbook.measuring.one_call import OneCall, fits
from kvbook.models import loading
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, evidence, recording
from kvreport.chapters.static_cache import BesideLlamaCppSettings, StaticCacheSettings, step_times, subject
from kvreport.chapters.static_cache.rows import GENERATE, MEMORY, ONE_CALL, OURS, THEIRS
from kvreport.engines.gguf_file import write_gguf

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
    kernels = step_times.reading(step_times.on_large_pages).values()
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


def inputs_beside(settings: StaticCacheSettings) -> Inputs | None:
    """Name the model; None where the chapter's own settings ask, for llama.cpp is no dependency."""
    if not isinstance(settings, BesideLlamaCppSettings):
        return None
    return subject.inputs(settings) | {"llama.cpp": _library().__version__}


def _library() -> Any:
    with refusing("llama.cpp is not installed: pip install llama-cpp-python, for this comparison alone", ImportError):
        import llama_cpp
    return llama_cpp


@subject.measured_at_once
def measure_beside(settings: StaticCacheSettings, _: Inputs, loaded: loading.Loaded) -> Rows:
    """Let all decode by turns."""
    ids = subject.prompt(settings, loaded)
    count, begins = settings.n_new_tokens, set()
    room = ids.shape[1] + count
    with tempfile.TemporaryDirectory(prefix="kvbook-") as scratch:
        theirs = _LlamaCpp(write_gguf(loaded.model, Path(scratch) / "model.gguf"), room)
        decoder, pages = decoding.Decoder(loaded.model, FASTEST, room), large_pages.LargePages(loaded.model)
        programs = {OURS: lambda: steps_of(decoder, ids, count), THEIRS: lambda: steps_of(theirs, ids, count)}
        if fits(loaded.model):
            programs[ONE_CALL] = lambda: by_calls(loaded.model, room, pages, ids, count)
        for repeat in progress.track(range(-1, settings.n_repeats), label="beside llama.cpp: repeat"):
            for program, decode in programs.items():
                seconds, tokens = decode()
                begins.add(tokens[0])
                if len(begins) > 1:
                    raise UserError(
                        "llama.cpp begins with another token: it has read other weights, and is not compared"
                    )
                # The first turn compiles, and warms caches up.
                if repeat >= 0:
                    yield {"repeat": repeat, "program": program} | in_the_middle(seconds)


class _LlamaCpp:
    """llama.cpp, one token at a time, on as many threads as torch; it is asked as `decoding.Decoder` is."""

    def __init__(self, file: Path, room: int) -> None:
        self._library = _library()
        options = {"n_threads": torch.get_num_threads(), "n_threads_batch": torch.get_num_threads()}
        self._model = self._library.Llama(str(file), n_ctx=room, verbose=False, **options)

    def start(self, ids: torch.Tensor) -> int:
        return self.step(*ids[0].tolist())

    def step(self, *tokens: int) -> int:
        self._model.eval(list(tokens))
        logits = self._library.llama_get_logits_ith(self._model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._model.n_vocab(),)).argmax())

    def close(self) -> None:
        self._model.reset()


BESIDE = Experiment("beside_llama_cpp", StaticCacheSettings, inputs_beside, measure_beside, timed=True, work=work)


def main() -> None:
    """Measure, record and cite, with the settings of the chapter's evidence."""
    settings = BesideLlamaCppSettings.checked(weights="package", n_repeats=10)
    folder = recording.record(BESIDE.run(settings).folder)
    evidence.cite("static_cache", evidence.PUBLISHED, folder)
    print(f"recorded in {folder}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"kvbook: {error}")
