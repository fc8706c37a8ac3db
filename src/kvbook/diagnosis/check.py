"""The tool that says of a checkpoint whether its cache is exact, within rounding, or wrong.

It runs the checkpoint as it is, in as many dtypes as the verdict needs, and says in a few lines what it found.
"""

import math
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from typing import Any

import pandas as pd
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvbook import UserError, __version__, older, progress
from kvbook.diagnosis import CheckSettings, faults, known, layerwise, refusals, storage, thorough, verdict, wrong_pass
from kvbook.diagnosis.outcome import INTENDED, STATUS, Drift, Outcome, PathFound, Slope
from kvbook.diagnosis.probe import TOGETHER, by_way, rows_of, samples_of, suspicious_layer, worst
from kvbook.measuring import UNIT_ROUNDOFF, costs, in_fp64
from kvbook.models import corpus, decoders, loading, placement, sources

# What an outcome depends on.
VERSIONS = {"kvbook": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
# What the verdict needs, in the order of trying: fp32 is quick and shows most bugs by their size; fp64, where there is
# a kernel and the memory for it, always decides; 16 bits stand in for it.
DTYPES = ("float32", "float64", "bfloat16", "float16")
_ENOUGH = 2

_NO_CACHE = "no cache came back: use_cache is false in the configuration, as it is by default in MPT's"
_USE_CACHE = 'pass use_cache=True in the call, or write "use_cache": true into config.json; generate() asks by itself'
_NO_CACHE_ANYWAY = "no cache came back, though one was asked for"
_LOOK_AT_FORWARD = "look at what the model's forward returns, and whether it hands past_key_values on"
_EQUAL_BITS = "; for equal bits run the model in `with kvbook.exact.row_invariant():`"
_NOTHING = "none needed" + _EQUAL_BITS * (transformers.__version__ in older.TRIED)
_GROUPED = "the grouped product of experts in float64, which it lacks: they ran one after the other"
_PACKED = "products of quantized weights: they were dequantized, since those round alike in every dtype"
_ONE_SOURCE = f"other source texts than one of {decoders.SOURCE} tokens, which the encoder reads"
_ON_CPU = "float64 on the device, which lacks it: it was run on the processor"
_HIDDEN_BELOW = "none needed; a fault that moves the logits by less than {:.1e} would hide below it"
_DECLARE = "keep keys and values in the model's dtype, or pass --cache-dtype {} if they are meant to be in fewer bits"


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
    measured = _Measured(settings)
    left_out = measured.in_dtypes()
    identity = measured.identity
    return Outcome(
        model=identity["name"], weights=identity["weights"], layers=identity["layers"],
        parameters=identity["parameters"], device=settings.device, threads=torch.get_num_threads(),
        texts=len(measured.texts), tokens=measured.longest,
        left_out={dtype: refusals.reason(error) for dtype, error in left_out.items()},
        not_tried=measured.not_tried(left_out), seconds=time.monotonic() - start, versions=VERSIONS,
        **measured.judged(),
    )


class _Measured:
    """A checkpoint, what is tried on it, and what the dtypes have shown: rows of texts, of other paths, of storage."""

    def __init__(self, settings: CheckSettings) -> None:
        self.settings, model, weights = settings, settings.model, settings.weights
        where = sources.resolve(model, weights)
        refusals.refuse_encoder(where.name, where.config)
        self.config, self.identity = where.config, loading.describe(model, weights)
        self.name, limit = self.identity["name"], self.identity["context_length"]
        n_tokens = min(settings.n_tokens, limit or settings.n_tokens)
        self.texts = samples_of(loading.tokenizer(model, weights), settings.corpus, settings.n_samples, n_tokens)
        refusals.refuse_vocabulary(self.name, self.config, self.texts)
        self.longest = max(len(text.ids) for text in self.texts)
        self.n_batches = math.ceil(len(self.texts) / TOGETHER)
        self.planned = settings.dtypes or DTYPES
        wanted = len(settings.dtypes or ()) or _ENOUGH
        self.little = None
        if settings.memory:
            self.little = layerwise.LittleMemory(settings, self.config, self.texts, self.planned, wanted)
            self.planned = tuple(self.little.models)
        elif self.identity["parameters"] > layerwise.LARGE:
            self._announce(wanted)
        self.paths, self.too_far = thorough.paths_of(self.config, limit) if settings.thorough else ({}, [])
        self.work = progress.TimeLeft(self._amount(self.planned[:wanted]), "check")
        self.open, self.rows, self.again, self.deep, self.moves = self.paths, [], [], [], []
        self.use_cache, self.experts_apart, self.on_cpu, self.wrong_pass = None, False, False, None

    def in_dtypes(self) -> dict[str, UserError]:
        """Measure as many dtypes as are needed; return why others were left out."""
        left_out = dict(self.little.left_out) if self.little else {}
        for dtype in self.planned:
            try:
                certain = self.add(dtype)
            except refusals.OfTheModelError:
                raise
            except UserError as error:
                left_out[dtype] = error
                continue
            if certain and self.settings.dtypes is None and not self.settings.thorough:
                break
        if not self.rows:
            raise next(iter(left_out.values()))
        return left_out

    def add(self, dtype: str) -> bool:
        """Measure one dtype; tell whether no further one can change the verdict, or two agree on one."""
        asked = self.settings
        # Float64 on the processor where the device has none: whether a cache is right is no matter of place.
        device = "cpu" if asked.device.startswith("mps") and dtype == "float64" else asked.device
        # Loaded here, so that it is gone before the next one is: both need not fit.
        how = {"weights": asked.weights, "device": device, "seed": asked.seed, "with_encoder": True}
        model = self.little.models[dtype].model if self.little else loading.load(asked.model, dtype=dtype, **how).model
        self.on_cpu |= device != asked.device
        self.use_cache = getattr(model.config.get_text_config(), "use_cache", None)
        self.model_type = model.config.get_text_config().model_type
        if dtype == "float64":
            self.experts_apart = self.little.experts_apart if self.little else in_fp64.experts_one_by_one(model)
        # Streamed, layers are counted, and not calls.
        counting = nullcontext() if self.little else model.register_forward_hook(
            lambda _model, arguments, _output: self.work.advance(_pieces(dtype, arguments[0].shape[1]))
        )
        with refusals.in_one_line(self.name), counting:
            # Where the configuration says nothing, the caller does, as `generate` does.
            found = self._rows_of(model, dtype, **{"use_cache": True} if self.use_cache is None else {})
            weights = self.little.weights(dtype) if self.little else model.named_parameters()
            refusals.refuse_not_finite(self.name, dtype, weights, found)
            if self.use_cache is not None and not any(row["held"] for row in found):
                self.again += self._rows_of(model, dtype, use_cache=True)
            self.rows += found
        if self.open and len({row["dtype"] for row in self.deep}) < _ENOUGH:
            ids = [token for text in self.texts for token in text.ids]
            n_tokens = sum(path.n_tokens for path in self.open.values())
            work = progress.TimeLeft(n_tokens, f"check, other paths in {dtype}")
            self.deep += thorough.rows_of(model, dtype, ids, self.open, work.advance)
            self.open = thorough.still_open(self.open, self.deep)
        finding = worst(by_way(pd.DataFrame(self.rows), asked.seed))[1]
        certain = any(not multiple <= verdict.LIMIT for multiple in finding.roundoffs.values()) or (
            finding.kind != "undecided" and len({row["dtype"] for row in self.rows}) >= _ENOUGH
        )
        # Streamed, each of these passes reads all weights again; of a cache that is switched off they tell nothing.
        if certain and finding.kind == "bug" and not (self.little and self.again):
            with refusals.in_one_line(self.name):
                refusals.refuse_reference(self.name, model, found, self.texts, streamed=bool(self.little))
            self.wrong_pass = None if self.little else self._wrong_pass(model)
        if asked.cache_dtype or (finding.kind == "bug" and not self.little):
            self.moves += self._moves(model, dtype)
        return certain

    def _rows_of(self, model: PreTrainedModel, dtype: str, **options: Any) -> list[dict[str, Any]]:
        if self.little and (found := self.little.rows(dtype, **options)) is not None:
            return found
        return list(rows_of(model, dtype, self.texts, self.settings.seed, together=TOGETHER, **options))

    def _wrong_pass(self, model: PreTrainedModel) -> str:
        texts = [torch.tensor([text.ids], device=model.device) for text in self.texts[:TOGETHER]]
        try:
            said, why = wrong_pass.find(model, texts)
        # A class may lack a way to fill its cache.
        except Exception as error:
            said, why = wrong_pass.UNTOLD, [f"raises {type(error).__name__}"]
        return f"{said}: {'; '.join(why)}"

    def _moves(self, model: PreTrainedModel, dtype: str) -> list[dict[str, Any]]:
        """Measure what storage in fewer bits than a dtype's does: in the declared format, or else in every one."""
        declared = self.settings.cache_dtype
        if not (names := storage.narrower(dtype, declared)):
            return []
        found = []
        # A class may want more of its cache than it hands over; undeclared, this would only have explained a verdict.
        with suppress(Exception):
            found = list(storage.rows_of(model, dtype, self.texts, names, self.settings.seed, use_cache=True))
        if any(row["drift"] for row in found):
            return found
        if declared:
            unknown = "what rounding does to this model's cache cannot be measured"
            raise refusals.OfTheModelError(f"--cache-dtype {declared}: {unknown}")
        return []

    def not_tried(self, left_out: Collection[str]) -> list[str]:
        """List what the check says nothing of."""
        seen = {row["dtype"] for row in self.rows} | set(left_out)
        found = [dtype for dtype in UNIT_ROUNDOFF if dtype not in seen]
        if self.settings.thorough:
            longest = max([self.longest, *(path.n_tokens for path in self.paths.values())])
            found += [f"{path}: too long a text" for path in self.too_far]
            found.append(f"texts of more than {longest:,} tokens: --tokens")
        else:
            found.append("windows, long texts, batch, padding, static cache, generate(): --thorough")
        quantized = getattr(self.config, "quantization_config", None) is not None
        packed = self.settings.weights not in sources.DRAWN and quantized
        found += [_GROUPED] * self.experts_apart + [_ON_CPU] * self.on_cpu + [_PACKED] * packed
        return found + [_ONE_SOURCE] * decoders.has_encoder(self.config)

    def _amount(self, dtypes: tuple[str, ...]) -> float:
        """Foresee the work of all calls."""
        length = self.longest
        calls = [length, 2, *[1] * (length - 2), length // 2, length - length // 2]
        return self.n_batches * sum(_pieces(dtype, n_tokens) for dtype in dtypes for n_tokens in calls)

    def _announce(self, wanted: int) -> None:
        """Say what a large model will take, before it is loaded."""
        asked = self.settings
        free = placement.free_bytes(placement.device_of(asked.device))
        sizes = {dtype: self.identity["parameters"] * getattr(torch, dtype).itemsize for dtype in self.planned}
        if fit := [dtype for dtype, size in sizes.items() if size < free][:wanted]:
            cost = costs.predict(
                self.config, fit, self.longest * min(len(self.texts), TOGETHER), n_passes=2 * self.n_batches,
                n_steps=self.n_batches * (self.longest - 2), device=asked.device,
            )
            progress.note(f"{self.name} in {', '.join(fit)} takes {cost.line()}, loading apart")

    def judged(self) -> dict[str, Any]:
        """Return the fields of an `Outcome`; a bug on another path decides if it is the only one."""
        rows, again, moves = map(pd.DataFrame, (self.rows, self.again, self.moves))
        declared = self.settings.cache_dtype
        fields = judged(rows, self.use_cache, self.settings.seed, again, moves, declared)
        if self.deep:
            allowed = storage.bounds(moves.groupby("dtype")["furthest"].max()) if declared and len(moves) else {}
            found = thorough.findings(self.deep, allowed)
            fields["paths"] += found
            wrong = next((each for each in found if each.verdict == "bug"), None)
            if wrong and fields["verdict"] != "bug":
                fields |= {
                    "verdict": "bug", "status": STATUS["bug"], "why": f"{wrong.path}: {wrong.detail}",
                    "path": wrong.path, "located": False, "remedy": self.paths[wrong.path].remedy,
                }
        if fields["verdict"] != "bug":
            return fields
        if fields["located"]:
            fields["wrong_pass"] = self.wrong_pass
        at_fault = {each.path for each in fields["paths"] if each.verdict == "bug"}
        # What the atlas knows, where nothing else was found.
        if not fields["cause"] and (fault := known.fault(self.model_type, at_fault, transformers.__version__)):
            cause, remedy = fault
            fields |= {"cause": f"known of {self.model_type}: {cause}", "remedy": remedy}
        return fields


def judged(
    rows: pd.DataFrame, use_cache: bool | None, seed: int, again: pd.DataFrame, moves: pd.DataFrame,
    declared: str | None = None,
) -> dict[str, Any]:
    """Return the fields of an `Outcome` that follow from the rows of texts.

    Parameters
    ----------
    rows : DataFrame
        From `rows_of`, all dtypes.
    use_cache : bool or None
        Of the configuration.
    seed : int
        Of the bootstrap.
    again : DataFrame
        The same with the cache asked for, where none came back; else empty.
    moves : DataFrame
        From `storage.rows_of`; empty where nothing was measured.
    declared : str or None
        What the cache is meant to keep keys and values in.
    """
    findings = by_way(rows, seed)
    way, finding = worst(findings)
    kind, why, cause, remedy = finding.kind, finding.why, None, _NOTHING
    if kind == "exact":
        remedy = "none needed"
    elif kind == "undecided":
        remedy = "add a finer dtype, float64 first of all (--dtypes), or more texts (--samples)"
    elif kind == "bug":
        cause, remedy = _cause(rows, use_cache, seed, again)
    stored = storage.storages(rows, moves) if len(moves) and kind in ("bug", "undecided") and cause is None else []
    if stored and declared and stored[0].explains:
        kind, why = INTENDED, stored[0].why(finding)
        remedy = _HIDDEN_BELOW.format(storage.MOST * stored[0].drift)
    elif stored and declared:
        cause = stored[0].excess if kind == "bug" else None
    elif kind == "bug" and (like := storage.nearest(stored)):
        cause, remedy = like.looks_like, f"{_DECLARE.format(like.name)}; if it is not that, {remedy}"
    slope = finding.slope
    return {
        "verdict": kind, "status": STATUS[kind], "why": why, "path": way,
        "drift": [
            Drift(dtype=dtype, mean=_finite(mean), roundoffs=_finite(finding.roundoffs[dtype]))
            for dtype, mean in finding.drift.items()
        ],
        "slope": slope and Slope(value=slope.value, low=slope.low, high=slope.high),
        "located": True,
        "first_suspicious_layer": suspicious_layer(rows[rows["way"] == way]) if kind == "bug" else None,
        "paths": [
            PathFound(path=name, verdict=kind if each.kind == finding.kind else each.kind, detail=each.why)
            for name, each in findings.items()
        ],
        "cause": cause, "remedy": remedy,
    }


def _finite(number: float) -> float | None:
    return number if abs(number) < float("inf") else None


def _cause(rows: pd.DataFrame, use_cache: bool | None, seed: int, again: pd.DataFrame) -> tuple[str | None, str]:
    if (rows["held"] == 0).all():
        cause, remedy = (_NO_CACHE, _USE_CACHE) if use_cache is False else (_NO_CACHE_ANYWAY, _LOOK_AT_FORWARD)
        if len(again):
            cause += f"; with use_cache=True: {worst(by_way(again, seed))[1].kind}"
        return cause, remedy
    if len(short := rows[rows["held"] != rows["fed"]]):
        first = short.iloc[0]
        held = f"the cache held {first['held']} tokens where {first['fed']} had been fed ({first['way']})"
        return held, _LOOK_AT_FORWARD
    return None, "look at positions, mask, and what the cache gives to attention, there and on the first cached call"


def _pieces(dtype: str, n_tokens: int) -> float:
    # A call reads all weights once, and computes with every token.
    return UNIT_ROUNDOFF[dtype] ** -0.1 * (1 + n_tokens / 16)


# The demonstration.

_SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
)
_TEXTS = [corpus.Sample(index, "random", 0, list(range(10 * index, 10 * index + 12))) for index in range(2)]


def demo() -> list[Outcome]:
    """Check a sound model and one with a fault, made on the spot; no file and no network is needed."""
    return [
        _checked("a sound model", lambda _model: nullcontext()),
        _checked("the same model, new positions counted from 0", faults.offset_forgotten),
    ]


def _checked(name: str, fault: Callable[[LlamaForCausalLM], faults.Injected]) -> Outcome:
    start, rows = time.monotonic(), []
    for dtype in ("float64", "float32"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(_SHAPE).eval().requires_grad_(False).to(getattr(torch, dtype))
        with fault(model):
            rows += rows_of(model, dtype, _TEXTS, together=len(_TEXTS))
    nothing = pd.DataFrame()
    return Outcome(
        model=name, weights="random", layers=_SHAPE.num_hidden_layers, parameters=model.num_parameters(), device="cpu",
        threads=torch.get_num_threads(), texts=len(_TEXTS), tokens=len(_TEXTS[0].ids), left_out={},
        not_tried=["float16", "bfloat16"], seconds=time.monotonic() - start, versions=VERSIONS,
        **judged(pd.DataFrame(rows), True, 0, nothing, nothing),
    )
