"""The execution paths on which caches go wrong and short texts fed token by token do not show it: one verdict each."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvbook.diagnosis import feeding, reference_pass, verdict
from kvbook.diagnosis.feeding import Fed, NoCache
from kvbook.diagnosis.outcome import INTENDED, PathFound
from kvbook.measuring.in_fp64 import widened
from kvbook.models import hub

# Tokens of the short texts, of padding in front of one, and of what `generate` writes.
LENGTH, PADDING, NEW = 20, 3, 6
# A boundary beyond it is not tried: the full passes on both sides of it would take too long.
LONGEST = 8192
# Tokens of the text that is tried where no boundary is known: a fault may begin at any length.
LONG = 256
# How many tokens before a boundary the cache is filled in one call, and how many after it are fed one by one.
_BEFORE, _AFTER = 2, 1
_CHUNKS = [5, 7, 1, 4, 3]
# Of two tokens at first: transformers' MPT makes no mask for a single token on an empty cache.
_STEPS = [2, *[1] * (LENGTH - 2)]
_BOUNDARIES = {
    "sliding window": ("sliding_window", "window_size", "local_attention", "attention_window_size"),
    "attention chunk": ("attention_chunk_size",),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}
# "quantized" rounds keys and values, by design.
_IMPLEMENTATIONS = ("dynamic", "static", "offloaded", "offloaded_static")

# Logits that should agree, shape (1, n, vocabulary): of full passes, and of the path.
Compared = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Path:
    """One execution path.

    Attributes
    ----------
    name : str
        As the report names it.
    n_tokens : int
        That it needs.
    compare : callable
        Feeds a model so many tokens; raises `NoCache` where the model has no such path.
    remedy : str
        What to do where it is wrong.
    promised : callable
        Tells of a model whether its class promises that the path works.
    """

    name: str
    n_tokens: int
    compare: Callable[[Fed, torch.Tensor], Compared]
    remedy: str
    promised: Callable[[PreTrainedModel], bool] = lambda _model: True


def boundaries(config: PretrainedConfig) -> dict[str, int]:
    """Find the lengths at which a model's attention or positions change, by what they are called."""
    values = config.get_text_config().to_dict()
    found = {}
    for what, names in _BOUNDARIES.items():
        for at in _numbers(values, names):
            if what == "sliding window" and values.get("use_sliding_window") is False:
                continue
            found[f"{what} at {at:,}"] = at
    return found


def _numbers(values: dict[str, Any], names: tuple[str, ...]) -> Iterator[int]:
    """Find numbers by their names, in nested dictionaries too: rotary parameters are kept by kind of layer."""
    for name, value in values.items():
        if name in names and isinstance(value, int) and not isinstance(value, bool) and value > _BEFORE + 2:
            yield value
        elif isinstance(value, dict):
            yield from _numbers(value, names)


def paths_of(model_config: PretrainedConfig, context: int | None) -> tuple[list[Path], list[str]]:
    """List the paths to try on a model, and the boundaries that are too far away."""
    found = [
        Path("chunked prefill", LENGTH, _chunks, "feed the prompt in one call"),
        Path("batch against single", LENGTH, _batch, "feed one text at a time"),
        Path("left padding", LENGTH, _padded, "pass position_ids that count from the first real token"),
        Path("left padding, token by token", LENGTH, _padded_steps,
             "extend attention_mask by each new token, and count position_ids from the first real token"),
        Path("static cache, full", LENGTH, _static, "use a dynamic cache", lambda model: model._can_compile_fullgraph),
        Path("cropped cache", LENGTH, _cropped, "fill a new cache instead of cropping one"),
        Path("copied cache, used twice", LENGTH, _copied, "fill a new cache for each text"),
        *(
            Path(f"generate, {name} cache", LENGTH, _generate(name), "use another cache_implementation",
                 lambda model, name=name: "static" not in name or model._can_compile_fullgraph)
            for name in _IMPLEMENTATIONS
        ),
        Path("generate, cache as long as the prompt", LENGTH, _as_long, "crop the cache by one token first"),
    ]
    too_far = []
    for name, at in boundaries(model_config).items():
        if at + _AFTER > min(LONGEST, context or LONGEST):
            too_far.append(name)
            continue
        remedy = f"keep texts below {at:,} tokens, or pass use_cache=False; look at the mask and the positions there"
        found.append(Path(name, at + _AFTER, _across(at), remedy))
    at = min(LONG, (context or LONG) - _AFTER)
    if at > max(path.n_tokens for path in found):
        remedy = "give --tokens other lengths, to find where it begins; look at the mask and the positions there"
        found.append(Path(f"long text, {at:,} tokens", at + _AFTER, _across(at), remedy))
    return found, too_far


def rows_of(
    model: PreTrainedModel, dtype: str, ids: list[int], paths: list[Path], done: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """Measure paths in one dtype."""
    generator = np.random.default_rng(0)
    with torch.inference_mode(), widened(model.dtype):
        longest = max((path.n_tokens for path in paths), default=0)
        more = generator.choice(ids, max(0, longest - len(ids))).tolist()
        text = torch.tensor([[*ids, *more]], device=model.device)
        fed = feeding.look_at(model, text[:, :LENGTH])
        fault = functools.cache(lambda: reference_pass.fault(model, text[:, :LENGTH]))
        for path in paths:
            row = {"path": path.name, "dtype": dtype, "source": "text", "sample": 0, "drift": None, "lacks": None}
            try:
                row["drift"] = verdict.drift_between(*path.compare(fed, text[:, : path.n_tokens]))
            except NoCache as error:
                row["lacks"] = str(error)
            # A path that the class does not know raises whatever its code makes of it.
            except Exception as error:
                row["lacks"] = f"raises {type(error).__name__}: {hub.first_line(error)}"[:150]
            if (
                row["drift"] is not None
                and not path.promised(model)
                and not verdict.is_small(row["drift"], model.dtype)
            ):
                row |= {"drift": None, "lacks": "gives other logits; its class makes no promise about static caches"}
            wrong = row["drift"] is not None and not verdict.is_small(row["drift"], model.dtype)
            # Beyond a boundary the passes have lengths of their own.
            if wrong and path.n_tokens == LENGTH and fault():
                row |= {"drift": None, "lacks": f"the full pass itself {fault()}"}
            done(path.n_tokens)
            yield row


def findings(rows: list[dict[str, Any]], allowed: Mapping[str, float] = MappingProxyType({})) -> list[PathFound]:
    """Judge every path; `allowed` is the drift, by dtype, that a cache which is meant to keep fewer bits may have."""
    found = []
    for name, part in pd.DataFrame(rows).groupby("path", sort=False):
        lacking = part[part["lacks"].notna()]
        if len(lacking):
            found.append(PathFound(path=name, verdict="not supported", detail=lacking["lacks"].iloc[0]))
            continue
        finding = verdict.judge(part.astype({"drift": float}))
        within = bool(allowed) and all(drift <= allowed[dtype] for dtype, drift in finding.drift.items())
        meant = finding.kind == "bug" and within
        found.append(PathFound(path=name, verdict=INTENDED if meant else finding.kind, detail=finding.why))
    return found


def still_open(paths: list[Path], rows: list[dict[str, Any]]) -> list[Path]:
    """List the paths that a finer dtype is needed for; the long ones only where nothing is decided."""
    kinds = {found.path: found.verdict for found in findings(rows)}
    short = ("rounding", "exact", "undecided")
    return [
        path
        for path in paths
        if kinds[path.name] == "undecided" or (path.n_tokens <= LENGTH and kinds[path.name] in short)
    ]


# The paths.


def _against_full(feed: Callable[[Fed, torch.Tensor], torch.Tensor]) -> Callable[[Fed, torch.Tensor], Compared]:
    return lambda fed, ids: (feeding.full(fed, ids), feed(fed, ids))


_chunks = _against_full(lambda fed, ids: feeding.in_parts(fed, ids, _CHUNKS)[0])
_batch = _against_full(feeding.in_batch)
_static = _against_full(lambda fed, ids: feeding.static(fed, ids, _STEPS, LENGTH))
_padded_steps = _against_full(lambda fed, ids: feeding.left_padded_in_parts(fed, ids, PADDING, _STEPS))
_cropped = _against_full(lambda fed, ids: feeding.cropped(fed, ids, 10, 4))


def _padded(fed: Fed, ids: torch.Tensor) -> Compared:
    expected, found = feeding.full(fed, ids), feeding.left_padded(fed, ids, PADDING)
    if not feeding.agree(fed, expected, found):
        raise NoCache(feeding.PADDING_COUNTS)
    return expected, found


def _copied(fed: Fed, ids: torch.Tensor) -> Compared:
    """Continue a copy of a filled cache with other tokens, then the cache itself with the text's own."""
    half, steps = LENGTH // 2, [1] * (LENGTH - LENGTH // 2)
    first, cache = feeding.in_parts(fed, ids[:, :half], [half])
    feeding.in_parts(fed, ids[:, :half].flip(1), steps, copy.deepcopy(cache))
    rest, _ = feeding.in_parts(fed, ids[:, half:], steps, cache)
    return feeding.full(fed, ids), torch.cat([first, rest], 1)


def _generate(implementation: str) -> Callable[[Fed, torch.Tensor], Compared]:
    def compare(fed: Fed, ids: torch.Tensor) -> Compared:
        if "offloaded" in implementation and ids.device.type == "cpu":
            raise NoCache("offloading is from a GPU to the host")
        return _generated(fed, ids, cache_implementation=implementation)

    return compare


def _generated(fed: Fed, ids: torch.Tensor, **options: Any) -> Compared:
    """Let ``generate`` write, and run what it wrote at once."""

    def write(**options: Any) -> Compared:
        written = fed.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                num_beams=1,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True, disable_compile=True, **options,
        )
        return feeding.full(fed, written.sequences[:, :-1])[:, -NEW:], torch.stack(written.logits, 1)

    compared = write(**options)
    if not feeding.agree(fed, *compared):
        without = write(use_cache=False)
        if not feeding.agree(fed, *without):
            raise NoCache(
                "generate() without a cache differs from a direct call too: it passes other positions or masks"
            )
    return compared


def _as_long(fed: Fed, ids: torch.Tensor) -> Compared:
    if fed.name is None or not fed.kind.endswith("DynamicCache"):
        raise NoCache(f"its cache is {fed.kind}")
    cache = feeding.in_parts(fed, ids, [LENGTH])[1]
    if not feeding.held(cache):
        raise NoCache("its cache does not count tokens")
    compared = _generated(fed, ids, **{fed.name: cache})
    if (feeding.held(cache) or 0) > LENGTH + NEW:
        raise NoCache("generate() feeds the whole prompt a second time: crop the cache by one token first")
    return compared


def _across(at: int) -> Callable[[Fed, torch.Tensor], Compared]:
    """Fill a cache to just below a length, go beyond it token by token, and run each of these lengths at once."""

    def compare(fed: Fed, ids: torch.Tensor) -> Compared:
        start = at - _BEFORE
        lengths = range(start + 1, at + _AFTER + 1)
        expected = [_last(fed, ids[:, :length]) for length in lengths]
        _, cache = feeding.in_parts(fed, ids[:, :start], [start])
        found = [feeding.in_parts(fed, ids[:, length - 1 : length], [1], cache)[0] for length in lengths]
        return torch.cat(expected, 1), torch.cat(found, 1)

    return compare


def _last(fed: Fed, ids: torch.Tensor) -> torch.Tensor:
    """Give the last token's logits alone; those of a long text would take more memory than the model."""
    # Some classes hand it on without naming it, or compute all of them all the same.
    kept = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(fed.model.forward).parameters else {}
    return feeding.full(fed, ids, **kept)[:, -1:]
