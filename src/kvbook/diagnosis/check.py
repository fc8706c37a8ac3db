"""The tool that says of a checkpoint whether its cache is exact, within rounding, or wrong.

It runs the checkpoint as it is, in as many dtypes as the verdict needs, and says in a few lines what it found.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
import transformers
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig, PreTrainedModel

from kvbook import __version__, progress
from kvbook.diagnosis import probe, reference_pass, storage, thorough, verdict
from kvbook.diagnosis.outcome import INTENDED, STATUS, Drift, Outcome, PathFound, Slope
from kvbook.diagnosis.rows import rows_of, samples_of, suspicious_layer, worst
from kvbook.diagnosis.settings import CheckSettings
from kvbook.errors import UserError
from kvbook.measuring import costs
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvbook.models import corpus, hub, loading, placement

# What the verdict needs, in the order of trying: fp32 is quick and shows most bugs by their size; fp64, where there is
# a kernel and the memory for it, always decides; 16 bits stand in for it.
DTYPES = ("float32", "float64", "bfloat16", "float16")
_ENOUGH = 2
# Texts that are fed together.
_TOGETHER = 4
# Parameters from which on time and memory are predicted before anything is loaded.
_LARGE = 1e9

_NO_CACHE = "no cache came back: use_cache is false in the configuration, as it is by default in MPT's"
_USE_CACHE = (
    'pass use_cache=True in the call, or write "use_cache": true into config.json; generate() asks for it by itself'
)
_NO_CACHE_ANYWAY = "no cache came back, though one was asked for"
_LOOK_AT_FORWARD = "look at what the model's forward returns, and whether it hands past_key_values on"
_LOOK_AT_LAYER = (
    "look at positions, mask, and what the cache gives to attention, there and on the first call with a cache"
)
_NOTHING = "none needed; for equal bits run the model in `with kvbook.exact.row_invariant():`"
_OTHER_PATHS = "windows, long texts, batch, padding, static cache, generate(): --thorough"
_GROUPED = "the grouped product of experts in float64, which it lacks: they ran one after the other"
_HIDDEN_BELOW = "none needed; a fault that moves the logits by less than {:.1e} would hide below it"
_DECLARE = "keep keys and values in the model's dtype, or pass --cache-dtype {} if they are meant to be in fewer bits"
_FINER = "add a finer dtype, float64 first of all (--dtypes), or more texts (--samples)"


def check(settings: CheckSettings) -> Outcome:
    """Check a checkpoint.

    Parameters
    ----------
    settings : CheckSettings
        What to run.  Dtypes that the device or the model's own kernels lack, or that do not fit into its memory, are
        left out and named.

    Raises
    ------
    UserError
        When the model is not there, has no causal pass, holds weights that are not finite, or fits in no dtype; when
        the corpus is too small.
    """
    start = time.monotonic()
    model, seed = settings.model, settings.seed
    identity = loading.describe(model, settings.weights)
    config = loading.config_of(model, settings.weights)
    _refuse_encoder(identity["name"], config)
    limit = identity["context_length"]
    texts = samples_of(
        loading.tokenizer(model, settings.weights),
        settings.corpus, settings.n_samples, min(settings.n_tokens, limit or settings.n_tokens),
    )
    if identity["parameters"] > _LARGE:
        _announce(config, identity, settings, texts)
    rows, again, deep, moves, left_out = [], [], [], [], {}
    use_cache, apart = None, False
    planned = settings.dtypes or DTYPES
    open_paths, too_far = thorough.paths_of(config, limit) if settings.thorough else ({}, [])
    paths = open_paths
    work = progress.Work(_amount(planned[: _wanted(settings)], texts), "check")
    for dtype in planned:
        try:
            loaded = loading.load(model, weights=settings.weights, dtype=dtype, device=settings.device, seed=seed)
            use_cache = getattr(loaded.model.config.get_text_config(), "use_cache", None)
            # Where the configuration says nothing, the caller does, as `generate` does.
            asks = {"use_cache": True} if use_cache is None else {}
            if dtype == "float64":
                apart = _experts_one_by_one(loaded.model)
            with _in_one_line(identity["name"]), _counted(loaded.model, dtype, work):
                found = list(rows_of(loaded.model, dtype, texts, seed, probe.WAYS, _TOGETHER, **asks))
                _refuse_not_finite(identity["name"], loaded.model, found)
                if not asks and not any(row["held"] for row in found):
                    again += rows_of(loaded.model, dtype, texts, seed, probe.WAYS, _TOGETHER, use_cache=True)
                rows += found
                certain = _is_certain(rows, seed)
            if open_paths and len({row["dtype"] for row in deep}) < _ENOUGH:
                deep += _deep(loaded.model, dtype, texts, open_paths)
                open_paths = thorough.still_open(open_paths, deep)
            wrong = worst(pd.DataFrame(rows), seed)[1].kind == "bug"
            if certain and wrong:
                with _in_one_line(identity["name"]):
                    _refuse_reference(identity["name"], loaded.model, _most_wrong(found, texts))
            if wrong or settings.cache_dtype:
                moves += _moves(loaded.model, dtype, texts, settings)
        except _OfTheModelError:
            raise
        except UserError as error:
            left_out[dtype] = error
            continue
        # Before the next one is loaded: both need not fit.
        del loaded
        if certain and settings.dtypes is None and not settings.thorough:
            break
    if not rows:
        raise next(iter(left_out.values()))
    table = pd.DataFrame(rows)
    fields = judged(
        table, use_cache, seed, pd.DataFrame(again) if again else None, pd.DataFrame(moves), settings.cache_dtype
    )
    if deep:
        fields = _with_paths(fields, thorough.findings(deep, _allowed(moves, settings.cache_dtype)), paths)
    return Outcome(
        model=identity["name"], weights=identity["weights"], layers=identity["layers"],
            parameters=identity["parameters"],
        device=settings.device, threads=torch.get_num_threads(),
        texts=len(texts), tokens=max(len(text.ids) for text in texts),
        left_out={dtype: _reason(error) for dtype, error in left_out.items()},
        not_tried=_not_tried(set(table["dtype"]) | set(left_out), texts, paths, too_far)
        + [_GROUPED] * apart,
        seconds=time.monotonic() - start,
        versions={"kvbook": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        **fields,
    )


def judged(
    rows: pd.DataFrame, use_cache: bool | None, seed: int, again: pd.DataFrame | None, moves: pd.DataFrame,
    declared: str | None = None,
) -> dict[str, Any]:
    """Give the fields of an `Outcome` that follow from the rows.

    Parameters
    ----------
    rows : DataFrame
        From `rows_of`, all dtypes.
    use_cache : bool or None
        Of the configuration.
    seed : int
        Of the bootstrap.
    again : DataFrame or None
        The same with the cache asked for, where none came back.
    moves : DataFrame
        From `storage.rows_of`; empty where nothing was measured.
    declared : str or None
        What the cache is meant to keep keys and values in.
    """
    way, finding = worst(rows, seed)
    kinds = {way: verdict.judge(part, seed) for way, part in rows.groupby("way", sort=False)}
    kind, why, cause, remedy = finding.kind, finding.why, None, _NOTHING
    if kind == "undecided":
        remedy = _FINER
    elif kind == "bug":
        cause, remedy = _cause(rows, use_cache, seed, again)
    stored = storage.storages(rows, moves) if len(moves) and kind in ("bug", "undecided") and cause is None else []
    if stored and declared and stored[0].explains:
        kind, why = INTENDED, stored[0].why(finding)
        remedy = _HIDDEN_BELOW.format(storage.MOST * stored[0].drift)
    elif stored and declared:
        cause = stored[0].excess if kind == "bug" else None
    elif kind == "bug" and (like := storage.nearest(stored)):
        cause, remedy = like.looks_like, _DECLARE.format(like.name)
    return {
        "verdict": kind,
        "status": STATUS[kind],
        "why": why,
        "path": way,
        "drift": [
            Drift(dtype=dtype, mean=_finite(mean), roundoffs=_finite(finding.roundoffs[dtype]))
            for dtype, mean in finding.drift.items()
        ],
        "slope": None
        if finding.slope is None
        else Slope(value=finding.slope.value, low=finding.slope.low, high=finding.slope.high),
        "located": True,
        "first_suspicious_layer": suspicious_layer(rows[rows["way"] == way]) if kind == "bug" else None,
        "paths": [
            PathFound(path=way, verdict=kind if each.kind == finding.kind else each.kind, detail=each.why)
            for way, each in kinds.items()
        ],
        "cause": cause,
        "remedy": remedy,
    }


def _moves(
    model: PreTrainedModel, dtype: str, texts: list[corpus.Sample], settings: CheckSettings
) -> list[dict[str, Any]]:
    """Measure what storage in fewer bits than a dtype's does: in the declared format, or else in every one."""
    declared = settings.cache_dtype
    if not (names := storage.narrower(dtype, declared)):
        return []
    try:
        found = list(storage.rows_of(model, dtype, texts, names, settings.seed, use_cache=True))
    # A class may want more of its cache than what it hands over; undeclared, this would only have explained a verdict.
    except Exception:
        found = []
    if any(row["drift"] for row in found):
        return found
    if declared:
        raise _OfTheModelError(f"--cache-dtype {declared}: what rounding does to this model's cache cannot be measured")
    return []


def _allowed(moves: list[dict[str, Any]], declared: str | None) -> dict[str, float]:
    """Give the drift of the logits' worst position that a declared format explains, by dtype."""
    if not declared or not moves:
        return {}
    return storage.bounds(pd.DataFrame(moves).groupby("dtype")["furthest"].max())


def _finite(number: float) -> float | None:
    return number if abs(number) < float("inf") else None


def _cause(rows: pd.DataFrame, use_cache: bool | None, seed: int, again: pd.DataFrame | None) -> tuple[str | None, str]:
    if (rows["held"] == 0).all():
        cause, remedy = (_NO_CACHE, _USE_CACHE) if use_cache is False else (_NO_CACHE_ANYWAY, _LOOK_AT_FORWARD)
        if again is not None:
            cause += f"; with use_cache=True: {worst(again, seed)[1].kind}"
        return cause, remedy
    if (short := rows[rows["held"] != rows["fed"]]).size:
        first = short.iloc[0]
        return (
            f"the cache held {first['held']} tokens where {first['fed']} had been fed ({first['way']})",
            _LOOK_AT_FORWARD,
        )
    return None, _LOOK_AT_LAYER


def _is_certain(rows: list[dict[str, Any]], seed: int) -> bool:
    """Tell whether no further dtype can change the verdict, or two agree on one."""
    finding = worst(pd.DataFrame(rows), seed)[1]
    if any(not multiple <= verdict.LIMIT for multiple in finding.roundoffs.values()):
        return True
    return finding.kind != "undecided" and len({row["dtype"] for row in rows}) >= _ENOUGH


def _experts_one_by_one(model: PreTrainedModel) -> bool:
    """Give experts a product that has float64, as transformers' default for many classes has not."""
    if not model._can_set_experts_implementation() or model.config._experts_implementation != "grouped_mm":
        return False
    stored = model.state_dict()
    if any(buffer.dim() > 1 and name in stored for name, buffer in model.named_buffers()):
        # MiniMax's checkpoints hold tables of decays that were rounded apart, to fp32: in fp64 they would look like a
        # bug.
        return False
    model.set_experts_implementation("eager")
    return True


def _wanted(settings: CheckSettings) -> int:
    return len(settings.dtypes) if settings.dtypes else _ENOUGH


def _not_tried(seen: set[str], texts: list[corpus.Sample], paths: dict[str, thorough.Path], too_far: list[str]) -> list[str]:
    dtypes = [dtype for dtype in UNIT_ROUNDOFF if dtype not in seen]
    if not paths:
        return [*dtypes, _OTHER_PATHS]
    longest = max(*(len(text.ids) for text in texts), *map(thorough.n_tokens, paths.values()))
    return [
        *dtypes,
        *(f"{path}: too long a text" for path in too_far),
        f"texts of more than {longest:,} tokens: --tokens",
    ]


def _deep(
    model: PreTrainedModel, dtype: str, texts: list[corpus.Sample], paths: dict[str, thorough.Path]
) -> list[dict[str, Any]]:
    ids = [token for text in texts for token in text.ids]
    work = progress.Work(sum(map(thorough.n_tokens, paths.values())), f"check, other paths in {dtype}")
    return list(thorough.rows_of(model, dtype, ids, paths, work.advance))


def _with_paths(fields: dict[str, Any], found: list[PathFound], paths: dict[str, thorough.Path]) -> dict[str, Any]:
    """Add the other paths to an outcome's fields; a bug on one of them decides, where there is none on the first ones."""
    fields = fields | {"paths": fields["paths"] + found}
    wrong = next((each for each in found if each.verdict == "bug"), None)
    if wrong is None or fields["verdict"] == "bug":
        return fields
    return fields | {
        "verdict": "bug", "status": STATUS["bug"], "why": f"{wrong.path}: {wrong.detail}", "path": wrong.path,
        "located": False, "remedy": paths[wrong.path].remedy,
    }


# Progress.


def _pieces(dtype: str, n_tokens: int) -> float:
    # A call reads all weights once, and computes with every token.
    return UNIT_ROUNDOFF[dtype] ** -0.1 * (1 + n_tokens / 16)


def _amount(dtypes: tuple[str, ...], texts: list[corpus.Sample]) -> float:
    length = max(len(text.ids) for text in texts)
    calls = [length, 2, *[1] * (length - 2), length // 2, length - length // 2]
    batches = -(-len(texts) // _TOGETHER)
    return batches * sum(_pieces(dtype, n_tokens) for dtype in dtypes for n_tokens in calls)


@contextmanager
def _counted(model: PreTrainedModel, dtype: str, work: progress.Work) -> Iterator[None]:
    """Count every call of a model as work that is done."""
    hook = model.register_forward_hook(
        lambda _model, arguments, _output: work.advance(_pieces(dtype, arguments[0].shape[1]))
    )
    try:
        yield
    finally:
        hook.remove()


def _announce(
    config: PretrainedConfig, identity: dict[str, Any], settings: CheckSettings, texts: list[corpus.Sample]
) -> None:
    """Say what a large model will take, before it is loaded."""
    place = placement.device_of(settings.device)
    free = placement.free_bytes(place)
    fit = [
        dtype for dtype in settings.dtypes or DTYPES if identity["parameters"] * getattr(torch, dtype).itemsize < free
    ]
    if not fit:
        return
    length = max(len(text.ids) for text in texts)
    batches = -(-len(texts) // _TOGETHER)
    cost = costs.predict(
        config, fit[: _wanted(settings)], length * min(len(texts), _TOGETHER), n_passes=2 * batches,
        n_steps=batches * (length - 2), device=settings.device,
    )
    named = ", ".join(fit[: _wanted(settings)])
    print(f"kvbook: {identity['name']} in {named} takes {cost.line()}, loading apart", file=sys.stderr, flush=True)


# Refusals.


class _OfTheModelError(UserError):
    """What no other dtype would mend."""


def _reason(error: UserError) -> str:
    return str(error).split(": leave ")[0].split(": this check ")[0]


@contextmanager
def _in_one_line(name: str) -> Iterator[None]:
    """Say in one line what a model's own code raises when it is called."""
    try:
        yield
    except UserError:
        raise
    # Its code raises whatever its author chose.
    except Exception as error:
        none = isinstance(error, AttributeError) and error.name == "past_key_values"
        reason = "its class returns none" if none else f"{type(error).__name__}: {hub.first_line(error)}"
        raise UserError(
            f"{name} cannot be run with past_key_values ({reason}): this check is for models that take them"
        ) from error


def _refuse_encoder(name: str, config: PretrainedConfig) -> None:
    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False
    if encoder or loading.is_masked(config):
        raise UserError(
            f"{name} is a masked model: each token sees those behind it too, so a cache of earlier tokens cannot give "
            "what the full pass gives, and its classes return none; set is_decoder=true in its configuration to make it causal"
        )


def _refuse_not_finite(name: str, model: PreTrainedModel, rows: list[dict[str, Any]]) -> None:
    """Name the weights that are NaN, where the full pass is."""
    if all(row["drift"] == row["drift"] for row in rows):
        return
    if model.dtype is torch.float16:
        # Weights of a wider dtype may be out of its range.
        return
    if wrong := [path for path, weight in model.named_parameters() if not weight.isfinite().all()]:
        raise _OfTheModelError(
            f"{name}: the weights hold NaN or infinity ({wrong[0]}, {len(wrong)} in all): fetch or save them again"
        )


def _most_wrong(rows: list[dict[str, Any]], texts: list[corpus.Sample]) -> corpus.Sample:
    index = max(rows, key=lambda row: row["drift"] if row["drift"] == row["drift"] else -1.0)["sample"]
    return next(text for text in texts if text.index == index)


def _refuse_reference(name: str, model: PreTrainedModel, text: corpus.Sample) -> None:
    """Acquit the cache where nothing could agree with the full pass."""
    fault = reference_pass.fault(model, torch.tensor([text.ids], device=model.device))
    if fault == reference_pass.NOT_REPEATABLE:
        raise _OfTheModelError(f"{name} {fault}: switch off what is random in it, such as dropout")
    if fault == reference_pass.NOT_CAUSAL:
        raise _OfTheModelError(f"{name} is not causal: the full pass {fault}, so that no cache can agree with it")
