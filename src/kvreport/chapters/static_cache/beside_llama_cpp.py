"""The fastest way of decoding, and a step in one call, beside llama.cpp: on the same weights in bf16, by turns.

llama.cpp is no dependency of the book.  To measure, on a quiet machine::

    pip install llama-cpp-python
    python -m kvreport.chapters.static_cache.beside_llama_cpp

llama.cpp gets the weights in a GGUF file that is written for the purpose.  All write the same number of tokens behind
the same prompt, greedily; a step is one token, its logits and the largest of them.  Rows, one a (repeat, program): see
``data/README.md``.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvbook import UserError, progress
from kvbook.measuring import decoding, large_pages
from kvbook.measuring.one_call import fits
from kvbook.models import loading
from kvbook.runs import Experiment, Inputs, Rows, evidence, recording
from kvreport.chapters.static_cache import subject
from kvreport.chapters.static_cache.one_call import FASTEST, by_calls, in_the_middle, steps_of, work
from kvreport.chapters.static_cache.rows import ONE_CALL, OURS, THEIRS
from kvreport.chapters.static_cache.settings import BesideLlamaCppSettings, StaticCacheSettings
from kvreport.engines.gguf_file import write_gguf


def inputs(settings: StaticCacheSettings) -> Inputs | None:
    """Name the model; None where the chapter's own settings ask, for llama.cpp is no dependency."""
    if not isinstance(settings, BesideLlamaCppSettings):
        return None
    return subject.inputs(settings) | {"llama.cpp": _library().__version__}


def _library() -> Any:
    try:
        import llama_cpp
    except ImportError:
        raise UserError("llama.cpp is not installed: pip install llama-cpp-python, for this comparison alone") from None
    return llama_cpp


@subject.measured_at_once
def measure(settings: StaticCacheSettings, _: Inputs, loaded: loading.Loaded) -> Rows:
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


EXPERIMENT = Experiment("beside_llama_cpp", StaticCacheSettings, inputs, measure, timed=True, work=work)


def main() -> None:
    """Measure, record and cite, with the settings of the chapter's evidence."""
    settings = BesideLlamaCppSettings.checked(weights="package", n_repeats=10)
    folder = recording.record(EXPERIMENT.run(settings).folder)
    evidence.cite("static_cache", evidence.PUBLISHED, folder)
    print(f"recorded in {folder}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"kvbook: {error}")
