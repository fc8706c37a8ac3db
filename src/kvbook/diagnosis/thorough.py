"""The execution paths on which caches go wrong and short texts fed token by token do not show it: one verdict each."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvbook.diagnosis import execution_paths, feeding, outcome, verdict, wrong_pass
from kvbook.diagnosis.execution_paths import SHORT, Path
from kvbook.measuring.in_fp64 import widened
from kvbook.models import hub

# A boundary beyond it is not tried: the full passes on both sides of it would take too long.
LONGEST = 8192
# Tokens of the text that is tried where no boundary is known: a fault may begin at any length.
LONG = 256
# How many tokens before a boundary the cache is filled in one call, and how many after it are fed one by one.
_BEFORE, _AFTER = 2, 1
_SOUND = ("rounding", "exact")
_BOUNDARIES = {
    "sliding window": ("sliding_window", "window_size", "local_attention", "attention_window_size"),
    "attention chunk": ("attention_chunk_size",),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}


def boundaries(config: PretrainedConfig) -> dict[str, int]:
    """Find the lengths at which a model's attention or positions change, by what they are called."""
    values = config.get_text_config().to_dict()
    return {
        f"{what} at {at:,}": at for what, names in _BOUNDARIES.items() for at in _numbers(values, names)
        if what != "sliding window" or values.get("use_sliding_window") is not False
    }


def _numbers(values: dict[str, Any], names: tuple[str, ...]) -> Iterator[int]:
    """Find numbers by their names, in nested dictionaries too: rotary parameters are kept by kind of layer."""
    for name, value in values.items():
        if name in names and isinstance(value, int) and not isinstance(value, bool) and value > _BEFORE + 2:
            yield value
        elif isinstance(value, dict):
            yield from _numbers(value, names)


def paths_of(config: PretrainedConfig, context: int | None) -> tuple[dict[str, Path], list[str]]:
    """Return the paths to try on a model by their names, and the boundaries that are too far away."""
    if context and context < SHORT + feeding.NEW:
        return {}, [f"all paths of --thorough, {SHORT + feeding.NEW} tokens"]
    found, too_far = execution_paths.of(execution_paths.THOROUGH), []
    look = "look at the mask and the positions there"
    for name, at in boundaries(config).items():
        if at + _AFTER > min(LONGEST, context or LONGEST):
            too_far.append(name)
        else:
            found[name] = _across(name, at, f"keep texts below {at:,} tokens, or pass use_cache=False; {look}")
    at = min(LONG, (context or LONG) - _AFTER)
    if at > max(path.n_tokens for path in found.values()):
        name = f"long text, {at:,} tokens"
        found[name] = _across(name, at, f"give --tokens other lengths, to find where it begins; {look}")
    return found, too_far


def _across(name: str, at: int, remedy: str) -> Path:
    return Path(
        name, "offset_by_one_far_on", remedy, feed=lambda fed, ids: fed.across(ids, at - _BEFORE), n_tokens=at + _AFTER
    )


def rows_of(
    model: PreTrainedModel, dtype: str, ids: list[int], paths: dict[str, Path], done: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """Measure paths in one dtype."""
    generator = np.random.default_rng(0)
    with torch.inference_mode(), widened(model.dtype):
        longest = max((path.n_tokens for path in paths.values()), default=0)
        more = generator.choice(ids, max(0, longest - len(ids))).tolist()
        text = torch.tensor([[*ids, *more]], device=model.device)
        fed = feeding.look_at(model, text[:, :SHORT])
        fault = functools.cache(lambda: wrong_pass.reference_fault(model, text[:, :SHORT]))
        for name, path in paths.items():
            drift = lacks = None
            try:
                drift = feeding.largest_drift(*path.compared(fed, text[:, : path.n_tokens]))
            except execution_paths.NoCache as error:
                lacks = str(error)
            # A path that the class does not know raises whatever its code makes of it.
            except Exception as error:
                lacks = f"raises {type(error).__name__}: {hub.first_line(error)}"[:150]
            if drift is not None and not feeding.is_small(drift, model.dtype):
                lacks = path.excuse(model)
                # Beyond a boundary the passes have lengths of their own.
                if not lacks and path.n_tokens == SHORT and fault():
                    lacks = f"the full pass itself {fault()}"
            done(path.n_tokens)
            drift = None if lacks else drift
            yield {"path": name, "dtype": dtype, "source": "text", "sample": 0, "drift": drift, "lacks": lacks}


def findings(rows: list[dict[str, Any]], allowed: Mapping[str, float] | None = None) -> list[outcome.PathFound]:
    """Judge every path; `allowed` is the drift, by dtype, that a cache which is meant to keep fewer bits may have."""
    found = []
    for name, part in pd.DataFrame(rows).groupby("path", sort=False):
        if (lacking := part["lacks"].dropna()).size:
            found.append(outcome.PathFound(path=name, verdict="not supported", detail=lacking.iloc[0]))
            continue
        finding = verdict.judge(part.astype({"drift": float}))
        within = bool(allowed) and all(drift <= allowed[dtype] for dtype, drift in finding.drift.items())
        kind = outcome.INTENDED if finding.kind == "bug" and within else finding.kind
        found.append(outcome.PathFound(path=name, verdict=kind, detail=finding.why))
    return found


def still_open(paths: dict[str, Path], rows: list[dict[str, Any]]) -> dict[str, Path]:
    """Return the paths that a finer dtype is needed for; the long ones only where nothing is decided."""
    kinds = {found.path: found.verdict for found in findings(rows)}
    short = {name for name, path in paths.items() if path.n_tokens <= SHORT}
    wanted = {name for name, kind in kinds.items() if kind == "undecided" or (name in short and kind in _SOUND)}
    return {name: path for name, path in paths.items() if name in wanted}
