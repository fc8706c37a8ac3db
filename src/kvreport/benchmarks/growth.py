"""``kvbook bench --growth``: how time and memory grow with texts, tokens, layers, architectures and rows.

Each piece of work is done at sizes ten times apart, each time in a process of its own, so that one's memory is not
another's.  Imports and inputs are not timed.  Rows, one a (piece, size, repeat): see ``data/README.md``.

`PIECES` lists what is measured.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from transformers import AutoConfig, AutoModelForCausalLM

from kvbook import UserError, paths, progress
from kvbook.atlas import configurations, running
from kvbook.diagnosis import CheckSettings, check
from kvbook.models import loading
from kvbook.runs import Experiment, Inputs, Rows, Writer, records
from kvbook.scores import outcome, tables
from kvbook.settings import Count, Settings
from kvreport.benchmarks import results
from kvreport.chapters.layer_drift import LayerDriftSettings, by_layer
from kvreport.chapters.layer_drift import measures as layer_drift
from kvreport.publishing import found
from kvreport.publishing.measures import Measure

Work = Callable[[], object]
# Tokens of one answer in the tables of log-probabilities.
_ANSWER = 250


def _check(**settings: Any) -> Work:
    asked = {"model": "llama", "weights": "stand-in", "dtypes": ("float32",)} | settings
    return partial(check.check, CheckSettings.checked(**asked))


def _check_of_layers(size: int, folder: Path) -> Work:
    tokenizer = loading.tokenizer("llama", "stand-in")
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=size, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(tokenizer),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _check(model=str(folder), weights="hub")


def _chapter_of_texts(size: int, folder: Path) -> Work:
    paths.RUNS = folder
    asked = LayerDriftSettings.checked(model="llama", weights="stand-in", dtypes=("float32",), n_samples=size)
    return partial(by_layer.EXPERIMENT.run, asked)


def _atlas(size: int) -> object:
    return list(running.measured(configurations.names()[:size], paths_only=True))


def _scores_of_rows(size: int, folder: Path) -> Work:
    generator = np.random.default_rng(size)
    places = np.arange(size)
    table = pd.DataFrame({
        "id": (places // _ANSWER).astype(str), "position": places % _ANSWER,
        "token": generator.integers(49152, size=size), "logprob": -generator.gamma(0.5, size=size),
    })
    other = table.assign(logprob=(table["logprob"] + generator.normal(0, 1e-4, size)).clip(upper=0.0))
    for name, rows in (("a", table), ("b", other)):
        rows.to_json(folder / f"{name}.jsonl", orient="records", lines=True)

    def compare() -> outcome.Outcome:
        a, b = tables.read(str(folder / "a.jsonl")), tables.read(str(folder / "b.jsonl"), "trainer")
        return outcome.of(tables.join(a, b))

    return compare


def _page_of_rows(size: int, _folder: Path) -> Work:
    """Copy a recorded run's rows under other files' names, and estimate all that the chapter says of them."""
    run = next(iter(found.published("layer_drift").values())).runs[by_layer.EXPERIMENT.name]
    copies = [run.rows.assign(source=run.rows["source"] + str(copy)) for copy in range(-(-size // len(run.rows)))]
    many = records.Run(run.about, None)
    many.__dict__["rows"] = pd.concat(copies, ignore_index=True).head(size)
    measures = [one for one in vars(layer_drift).values() if isinstance(one, Measure)]

    def estimate() -> list[Any]:
        of = found.of_runs("layer_drift", {by_layer.EXPERIMENT.name: many})
        return [measure(of) for measure in measures]

    return estimate


class Piece(NamedTuple):
    """A piece of work: what it is, what its size counts, the sizes, and what prepares it in a folder."""

    what: str
    counts: str
    sizes: tuple[int, ...]
    prepare: Callable[[int, Path], Work]


PIECES = (
    Piece("kvbook check", "texts", (4, 40, 400), lambda size, _: _check(n_samples=size)),
    Piece("kvbook check", "tokens a text", (10, 100, 1000), lambda size, _: _check(n_tokens=size)),
    Piece("kvbook check", "layers", (4, 40, 400), _check_of_layers),
    Piece("chapter 6: drift", "texts", (4, 40, 400), _chapter_of_texts),
    Piece("kvbook atlas --paths-only", "architectures", (1, 10, 100), lambda size, _: partial(_atlas, size)),
    Piece("kvbook scores", "tokens", (1000, 10_000, 100_000, 1_000_000), _scores_of_rows),
    Piece("numbers of a page", "rows", (9600, 96_000, 960_000), _page_of_rows),
)


class GrowthSettings(Settings):
    """Settings of the measurement of growth.

    Attributes
    ----------
    n_repeats : int
        How often each size is measured.
    largest : int or None
        Leaves out larger sizes; None for none.
    """

    n_repeats: Count = 3
    largest: Count | None = None


def measured(number: int, size: int) -> dict[str, float]:
    """Do a piece once in this process: its seconds, and the bytes held at most, before it and until its end."""
    with tempfile.TemporaryDirectory(prefix="kvbook-growth-") as folder:
        work = PIECES[number].prepare(size, Path(folder))
        before = _held()
        start = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - start, "n_bytes_before": before, "n_bytes": _held()}


def _held() -> int:
    """Count the bytes that this process held at most, or the largest of its children."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _in_a_process(number: int, size: int) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, str(number), str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"{PIECES[number].what}, {size} {PIECES[number].counts}: see the error above")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(settings: GrowthSettings, _made_of: Inputs, writer: Writer) -> None:
    """Measure every piece at every size; an interrupted run goes on after the last repeat of a piece."""
    for repeat in range(settings.n_repeats):
        for number, piece in enumerate(PIECES):
            if (key := f"{number} {repeat}") not in writer.done:
                writer.append(key, _rows(number, piece, repeat, settings.largest))


def _rows(number: int, piece: Piece, repeat: int, largest: int | None) -> Rows:
    sizes = [size for size in piece.sizes if largest is None or size <= largest]
    for size in progress.track(sizes, label=f"{piece.what}, {piece.counts}: size"):
        about = {"what": piece.what, "counts": piece.counts, "size": size, "repeat": repeat}
        yield about | _in_a_process(number, size)


GROWTH = Experiment(results.GROWTH, GrowthSettings, lambda _settings: {}, _measure, timed=True)

if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]), int(sys.argv[2]))))
