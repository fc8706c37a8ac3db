"""``kvbook selftest``: whether loading, caches, row-invariant mode and the compiler work on a device, beside the book's numbers.

Each part runs at a small and at a full-size shape.  A part that fails is one line, and the others go on.  Every
selftest is a run of its own, and its result one JSON file that names neither a person nor a path.  Rows, one a number:
see ``data/README.md``.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kvbook import fingerprint
from kvbook.diagnosis import check, faults, probe, verdict
from kvbook.errors import UserError
from kvbook.exact import verify
from kvbook.models import corpus, loading, packages
from kvbook.runs import evidence, machine, privacy, records
from kvbook.settings import Settings
from kvreport.chapters.layer_drift import by_layer
from kvreport.chapters.layer_drift import measures as layer_drift
from kvreport.chapters.layer_drift.settings import LayerDriftSettings
from kvreport.chapters.static_cache import measures as static_cache
from kvreport.chapters.static_cache import rows as static_rows
from kvreport.chapters.static_cache import speed
from kvreport.chapters.static_cache.settings import StaticCacheSettings
from kvreport.publishing import found

EXPERIMENT = "selftest"
SCHEMA = 1

# What is loaded: a small trained model, and a full-size architecture with random weights.
SHAPES = {"small": ("llama", "stand-in"), "full size": ("smollm2", "random")}
# Apple's GPUs have no fp64, and the verdict does without it.
DTYPES = ("float32", "float16", "bfloat16")
_N_TEXTS, _N_TOKENS = 4, 48

Rows = Iterator[dict[str, Any]]


class SelftestSettings(Settings):
    """Settings of a selftest: the device; and a seed that is new each time, so that each is a run of its own."""


def _found(what: str, value: float | str, dtype: str = "", published: float | None = None) -> dict[str, Any]:
    return {"what": what, "dtype": dtype, "value": value, "published": published}


def _in_each_dtype(device: str, model: str, weights: str) -> Iterator[tuple[str, torch.nn.Module, list[torch.Tensor]]]:
    for dtype in DTYPES:
        loaded = loading.load(model, weights=weights, dtype=dtype, device=device)
        samples = corpus.samples("stdlib", loaded.tokenizer, _N_TEXTS, _N_TOKENS)
        yield dtype, loaded.model, [torch.tensor([sample.ids], device=loaded.model.device) for sample in samples]


def loads(settings: SelftestSettings, *shape: str) -> Rows:
    """Load the model in every dtype, and read a text."""
    for dtype, model, texts in _in_each_dtype(settings.device, *shape):
        with torch.inference_mode():
            logits = model(texts[0]).logits
        yield _found("finite share of the logits", logits.isfinite().float().mean().item(), dtype)


def drift(settings: SelftestSettings, *shape: str) -> Rows:
    """Compare the last token's logits with and without a cache."""
    for dtype, model, texts in _in_each_dtype(settings.device, *shape):
        with torch.inference_mode():
            rows = [row for ids in texts for row in by_layer.compare(model, ids) if row["place"] == "logits"]
        largest = statistics.fmean(row["max_abs"] for row in rows)
        yield _found(f"largest difference of the logits, mean of {len(rows)} texts", largest, dtype)


def drift_of_a_trained_model(settings: SelftestSettings, *_shape: str) -> Rows:
    """Measure how drift grows with depth in the trained model, as the book does; nothing where it was not fetched."""
    if not packages.is_here(by_layer.TRAINED_FAMILY):
        return
    asked = LayerDriftSettings.checked(device=settings.device)
    known = _growth(_recorded("layer_drift", by_layer.EXPERIMENT))
    for dtype, growth in _growth(by_layer.TRAINED.run(asked)).items():
        yield _found("growth of the drift per layer", growth, dtype, known.get(dtype))


def _growth(run: records.Run | None) -> dict[str, float]:
    table = layer_drift.GROWTH.table(found.of_runs("layer_drift", {"layer_drift": run}))
    return {row.dtype: row.estimate.value for row in table.itertuples()}


def _recorded(chapter: str, experiment: Any) -> records.Run | None:
    """Find the first recorded run of an experiment that a chapter cites."""
    for folder in evidence.folders(chapter):
        if folder.parent.name == experiment.name:
            return records.load(folder)
    return None


def tells_bugs(settings: SelftestSettings, model: str, weights: str) -> Rows:
    """Judge the clean model, and the same with an injected bug, which must be found."""
    cases = {"clean model": lambda _model: nullcontext(), "positions from 0 on a cache": faults.offset_forgotten}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for dtype in DTYPES:
        loaded = loading.load(model, weights=weights, dtype=dtype, device=settings.device)
        texts = check.samples_of(loaded.tokenizer, "stdlib", _N_TEXTS, _N_TOKENS)
        for name, fault in cases.items():
            with torch.inference_mode(), fault(loaded.model):
                rows[name] += check.rows_of(loaded.model, dtype, texts, ways=(probe.SPLIT,))
    for name, measured in rows.items():
        yield _found(f"verdict, {name}", verdict.judge(pd.DataFrame(measured)).kind)


def is_exact(settings: SelftestSettings, *shape: str) -> Rows:
    """Feed a text on every path in row-invariant mode."""
    for dtype, model, texts in _in_each_dtype(settings.device, *shape):
        shares = [found.equal_rows / found.rows for found in verify(model, texts[0])]
        yield _found(f"share of rows bitwise identical, least of {len(shares)} paths", min(shares), dtype)


def decodes(settings: SelftestSettings, model: str, weights: str) -> Rows:
    """Write tokens with each cache, eager and compiled."""
    asked = StaticCacheSettings.checked(
        model=model, weights=weights, device=settings.device, seed=settings.seed, n_new_tokens=64, n_repeats=3
    )
    known = _speeds(_recorded("static_cache", speed.EXPERIMENT)) if weights == "random" else {}
    for name, value in _speeds(speed.EXPERIMENT.run(asked)).items():
        yield _found(f"tokens/s, {name}", value, asked.dtype, known.get(name))


def _speeds(run: records.Run | None) -> dict[str, float]:
    in_loop = static_cache.SPEED.where(engine=static_rows.LOOP)
    table = in_loop.table(found.of_runs("static_cache", {"static_speed": run}))
    return {row.way: row.estimate.value for row in table.itertuples()}


PARTS: dict[str, Callable[..., Rows]] = {
    "loads": loads,
    "drift": drift,
    "tells a bug from rounding": tells_bugs,
    "row-invariant mode": is_exact,
    "static and compiled decoding": decodes,
}


def run(settings: SelftestSettings) -> records.Run:
    """Run every part at every shape; one that was interrupted goes on behind its last part."""
    made_of = {
        "settings": settings.model_dump(mode="json", include={"device", "seed"}),
        "source": fingerprint.of_source([__name__]),
        "models": [loading.identify(model, weights, settings.seed) for model, weights in SHAPES.values()],
        "machine": machine.describe(settings.device),
    }
    parts = [(name, shape, part) for shape in SHAPES for name, part in PARTS.items()]
    parts.append(("drift", "trained model", drift_of_a_trained_model))

    def measure(writer: records.Writer) -> None:
        for name, shape, part in parts:
            if (unit := f"{name}, {shape}") not in writer.done:
                writer.append(unit, _tried(unit, lambda part=part, shape=shape: part(settings, *SHAPES.get(shape, ()))))

    return records.run(EXPERIMENT, made_of, measure, note={"commit": machine.commit()})


def _tried(unit: str, part: Callable[[], Rows]) -> list[dict[str, Any]]:
    about = {"part": unit, "status": "ok", "why": ""}
    try:
        return [about | row for row in part()] or [about | {"status": "left out"} | _found("", "")]
    except Exception as error:  # Whatever this device does is the result, and no reason to leave the other parts out.
        first = (str(error).strip() or "no message").splitlines()[0]
        kind = type(error).__name__
        named = privacy.owner_in(first) + privacy.secrets_in(first)
        why = f"{kind} (its message names a path or a person)" if named else f"{kind}: {first}"
        return [about | {"status": "failed", "why": why} | _found("", "")]


def lines(rows: pd.DataFrame) -> list[str]:
    """Write a selftest for people: a line a part, with its numbers and, where the book has one, the book's."""
    return [_line(part, of_it) for part, of_it in rows.groupby("part", sort=False)]


def _line(part: str, rows: pd.DataFrame) -> str:
    status, why = rows["status"].iloc[0], rows["why"].iloc[0]
    if status != "ok":
        return f"{status:8s}  {part}{f': {why}' if isinstance(why, str) and why else ''}"
    found = [
        f"{row.what}{f' {row.dtype}' if isinstance(row.dtype, str) else ''} {_short(row.value)}"
        + (f" (book {_short(row.published)})" if pd.notna(row.published) else "")
        for row in rows.itertuples()
    ]
    return f"ok        {part}: {'; '.join(found)}"


def _short(value: Any) -> str:
    try:
        return f"{float(value):.3g}"
    except ValueError:
        return str(value)


def write(done: records.Run, file: Path) -> None:
    """Write what was found as JSON: rows, machine and versions, without the settings, which may name a path."""
    about = {name: done.about[name] for name in ("hash", "machine", "commit", "started", "finished")}
    rows = json.loads(done.rows.to_json(orient="records"))
    text = json.dumps({"schema": SCHEMA, **about, "rows": rows}, indent=1) + "\n"
    if named := [*privacy.owner_in(text), *privacy.secrets_in(text)]:
        raise UserError(f"{file} was not written, since it would publish {'; '.join(named)}")
    part = file.with_name(f".{file.name}.partial")
    with records.writable(file.parent):
        part.write_text(text, "utf-8")
        part.replace(file)
