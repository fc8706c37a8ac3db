"""``kvbook selftest``: whether loading, caches, row-invariant mode and the compiler work on a device.

Each part runs at a small and at a full-size shape.  A part that fails is one line, and the others go on.  A selftest's
seed is new each time, so that each is a run of its own; its result is one JSON file that names neither a person nor a
path.  Rows, one a number: see ``data/README.md``.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kvbook import UserError, paths
from kvbook.diagnosis import check, faults, probe, verdict
from kvbook.exact import verify
from kvbook.models import corpus, loading
from kvbook.runs import Experiment, Inputs, Row, Rows, Writer, privacy, records
from kvbook.settings import Settings
from kvreport.chapters.layer_drift import by_layer
from kvreport.chapters.static_cache import StaticCacheSettings, speed
from kvreport.chapters.static_cache import measures as static_cache
from kvreport.chapters.static_cache import rows as static_rows
from kvreport.publishing import found

SCHEMA = 1

# What is loaded: a small trained model, and a full-size architecture with random weights.
SHAPES = {"small": ("llama", "stand-in"), "full size": ("smollm2", "random")}
# Apple's GPUs have no fp64, and the verdict does without it.
DTYPES = ("float32", "float16", "bfloat16")


def _row(what: str, value: float | str, dtype: str = "", published: float | None = None) -> Row:
    return {"what": what, "dtype": dtype, "value": value, "published": published}


def _in_each_dtype(device: str, model: str, weights: str) -> Iterator[tuple[str, torch.nn.Module, list[corpus.Sample]]]:
    for dtype in DTYPES:
        loaded = loading.load(model, weights=weights, dtype=dtype, device=device)
        with torch.inference_mode():
            yield dtype, loaded.model, check.samples_of(loaded.tokenizer, "stdlib", n_samples=4, n_tokens=48)


def _ids(model: torch.nn.Module, text: corpus.Sample) -> torch.Tensor:
    return torch.tensor([text.ids], device=model.device)


def loads(settings: Settings, *shape: str) -> Rows:
    """Load the model in every dtype, and read a text."""
    for dtype, model, texts in _in_each_dtype(settings.device, *shape):
        finite = model(_ids(model, texts[0])).logits.isfinite().float().mean().item()
        yield _row("finite share of the logits", finite, dtype)


def drift(settings: Settings, *shape: str) -> Rows:
    """Compare the last token's logits with and without a cache."""
    for dtype, model, texts in _in_each_dtype(settings.device, *shape):
        rows = [row for text in texts for row in by_layer.compare(model, _ids(model, text)) if row["place"] == "logits"]
        largest = statistics.fmean(row["max_abs"] for row in rows)
        yield _row(f"largest difference of the logits, mean of {len(rows)} texts", largest, dtype)


def tells_bugs(settings: Settings, *shape: str) -> Rows:
    """Judge the clean model, and the same with an injected bug, which must be found."""
    cases = {"clean model": lambda _model: nullcontext(), "positions from 0 on a cache": faults.offset_forgotten}
    rows: dict[str, list[Row]] = {name: [] for name in cases}
    for dtype, model, texts in _in_each_dtype(settings.device, *shape):
        for name, fault in cases.items():
            with fault(model):
                rows[name] += check.rows_of(model, dtype, texts, ways=(probe.SPLIT,))
    for name, measured in rows.items():
        yield _row(f"verdict, {name}", verdict.judge(pd.DataFrame(measured)).kind)


def is_exact(settings: Settings, *shape: str) -> Rows:
    """Feed a text on every path in row-invariant mode."""
    for dtype, model, texts in _in_each_dtype(settings.device, *shape):
        shares = [path.equal_rows / path.rows for path in verify(model, _ids(model, texts[0]))]
        yield _row(f"share of rows bitwise identical, least of {len(shares)} paths", min(shares), dtype)


def decodes(settings: Settings, model: str, weights: str) -> Rows:
    """Write tokens with each cache, eager and compiled."""
    asked = StaticCacheSettings.checked(
        model=model, weights=weights, device=settings.device, seed=settings.seed, n_new_tokens=64, n_repeats=3
    )
    in_loop = static_cache.SPEED.where(engine=static_rows.LOOP)

    def speeds(of: found.Found) -> dict[str, float]:
        return {row.way: row.estimate.value for row in in_loop.table(of).itertuples()}

    known = speeds(found.printed("static_cache")) if weights == "random" else {}
    here = found.of_runs("static_cache", {"static_speed": speed.EXPERIMENT.run(asked)})
    for name, value in speeds(here).items():
        yield _row(f"tokens/s, {name}", value, asked.dtype, known.get(name))


PARTS: dict[str, Callable[..., Rows]] = {
    "loads": loads, "drift": drift, "tells a bug from rounding": tells_bugs, "row-invariant mode": is_exact,
    "static and compiled decoding": decodes,
}


def _inputs(settings: Settings) -> Inputs:
    return {"models": [loading.identify(model, weights, settings.seed) for model, weights in SHAPES.values()]}


def _measure(settings: Settings, _made_of: Inputs, writer: Writer) -> None:
    """Run every part at every shape; an interrupted selftest goes on after its last finished part."""
    parts = {f"{name}, {shape}": (part, asked) for shape, asked in SHAPES.items() for name, part in PARTS.items()}
    for unit, (part, shape) in writer.pending(parts, "selftest: part"):
        writer.append(unit, _tried(unit, part, settings, *shape))


EXPERIMENT = Experiment("selftest", Settings, _inputs, _measure, fields=frozenset({"device", "seed"}))


def _tried(unit: str, part: Callable[..., Rows], *arguments: Any) -> list[Row]:
    about = {"part": unit, "status": "ok", "why": ""}
    try:
        return [about | row for row in part(*arguments)]
    except Exception as error:  # Whatever this device does is the result, and no reason to leave the other parts out.
        first = (str(error).strip() or "no message").splitlines()[0]
        is_private = privacy.owner_in(first) or privacy.secrets_in(first)
        said = " (its message names a path or a person)" if is_private else f": {first}"
        return [about | {"status": "failed", "why": f"{type(error).__name__}{said}"} | _row("", "")]


def lines(rows: pd.DataFrame) -> list[str]:
    """Write a selftest for people: a line a part, with its numbers and, where the book has one, the book's."""
    return [_line(part, of_it.fillna("")) for part, of_it in rows.astype(object).groupby("part", sort=False)]


def _line(part: str, rows: pd.DataFrame) -> str:
    status, why = rows["status"].iloc[0], rows["why"].iloc[0]
    books = [f"(book {_short(value)})" if value != "" else "" for value in rows["published"]]
    parts = zip(rows["what"], rows["dtype"], rows["value"].map(_short), books, strict=True)
    said = "; ".join(" ".join(filter(None, each)) for each in parts) if status == "ok" else why
    return f"{status:8s}  {part}{f': {said}' if said else ''}"


def _short(value: Any) -> str:
    with suppress(ValueError):
        return f"{float(value):.3g}"
    return str(value)


def write(done: records.Run, file: Path) -> None:
    """Write what was found as JSON: rows, machine and versions, without the settings, which may name a path."""
    about = {name: done.about[name] for name in ("hash", "machine", "commit", "started", "finished")}
    rows = json.loads(done.rows.to_json(orient="records"))
    text = json.dumps({"schema": SCHEMA, **about, "rows": rows}, indent=1) + "\n"
    if named := [*privacy.owner_in(text), *privacy.secrets_in(text)]:
        raise UserError(f"{file} was not written, since it would publish {'; '.join(named)}")
    with records.writable(file.parent):
        paths.keep(file, text.encode())
