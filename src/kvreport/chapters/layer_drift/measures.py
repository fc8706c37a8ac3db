"""Measures of the chapter on issue 25420, then the sentences and the claims that they decide."""

from collections.abc import Callable
from functools import partial

import pandas as pd

from kvbook.measuring import UNIT_ROUNDOFF, estimates
from kvbook.measuring.estimates import Estimate
from kvreport.chapters.layer_drift import rows
from kvreport.chapters.layer_drift.rows import LAST, POSITIONS, POSTED, STOCK
from kvreport.publishing.estimators import distinct, first, mean, median_of_ratios, part, ratio_of_means, share, total
from kvreport.publishing.found import Found
from kvreport.publishing.measures import Measure, always, claim, either, here, noted, of_model, said
from kvreport.publishing.rules import ALL, HALF, Bound, anyone, every, most, other_cause, refuted, reproduced
from kvreport.publishing.verdicts import Claims


def _fittable(drift: pd.DataFrame, column: str) -> estimates.Resampled | None:
    """Resample a series whose mean is above zero in every inner layer and draw: a logarithm takes no other."""
    inner = rows.inner(drift)
    # A model that overflows has no drift there.
    if inner[column].isna().any():
        return None
    resampled = estimates.resample(inner, column)
    positive = len(resampled.layers) >= 3 and (resampled.mean > 0).all() and (resampled.draws > 0).all()
    return resampled if positive else None


def _growth(column: str, drift: pd.DataFrame) -> Estimate | None:
    series = _fittable(drift, column)
    return series and estimates.growth_resampled(series)


def _ratio(coarse: pd.DataFrame, fine: pd.DataFrame) -> Estimate | None:
    both = [_fittable(drift, "max_abs") for drift in (coarse, fine)]
    return estimates.ratio_resampled(*both) if all(both) else None


def _over_roundoffs(ratio: Callable[..., Estimate | None], coarse: pd.DataFrame, fine: pd.DataFrame) -> Estimate | None:
    """Divide a ratio of two dtypes by that of their unit roundoffs."""
    roundoffs = [UNIT_ROUNDOFF[drift["dtype"].iloc[0]] for drift in (coarse, fine)]
    found = ratio(coarse, fine)
    return found and found.over(roundoffs[0] / roundoffs[1])


def _fitted_growth(drift: pd.DataFrame) -> Estimate:
    inner = rows.inner(drift)
    return estimates.growth_per_layer(inner["layer"].to_numpy(), inner["max_abs"].to_numpy())


def _fitted_ratio(coarse: pd.DataFrame, fine: pd.DataFrame) -> Estimate:
    return estimates.geometric_mean_ratio(*(rows.inner(drift)["max_abs"].to_numpy() for drift in (coarse, fine)))


def _finer(dtype: str, dtypes: list[str]) -> str | None:
    """Choose the next finer dtype; a run without it has none, for a ratio to another one says something else."""
    finer = [other for other in UNIT_ROUNDOFF if UNIT_ROUNDOFF[other] < UNIT_ROUNDOFF[dtype]]
    nearest = max(finer, key=UNIT_ROUNDOFF.__getitem__, default=None)
    return nearest if nearest in dtypes else None


_SERIES = ("model", "dtype")
DIFFERING = Measure(
    "share of texts whose logits differ in a bit", "file", "model and dtype", rows="logits", by=_SERIES,
    estimate=share("differs"),
)
# The claim is on models, so one model says nothing of it, however many texts it reads.
DRIFTING = Measure(
    "share of models in which the logits of more than half of the texts differ in a bit", "model", "dtype",
    rows="models that drift", by=("dtype",), estimate=share("drifts", "model"),
)
IDENTICAL = Measure(
    "share of texts of drawn lengths whose logits are bitwise identical", "file", "dtype",
    rows="logits at drawn lengths", by=("dtype",), estimate=share("identical"),
)
IDENTICAL_AT_ALL_LENGTHS = IDENTICAL.alike(rows="logits at all lengths", by=("tokens", "dtype"))
GROWTH = Measure(
    "growth per layer of the absolute drift", "file", "model and dtype", "{:+.1%}", rows="layer_drift", by=_SERIES,
    estimate=partial(_growth, "max_abs"),
)
RELATIVE_GROWTH = GROWTH.alike("growth per layer of the relative drift", partial(_growth, "relative_rms"))
RATIO = Measure(
    "drift of a dtype over that of the next finer one", "file", "model and pair of dtypes", "{:,.2g}",
    rows="layer_drift", by=_SERIES, over=("dtype", _finer), estimate=_ratio,
)
RATIO_OVER_ROUNDOFFS = RATIO.alike(
    "drift of a dtype over that of the next finer one, over the ratio of their roundoffs",
    partial(_over_roundoffs, _ratio), form="{:.2f}",
)
THEIR_GROWTH = GROWTH.alike("the issue's growth", _fitted_growth, unit="", rows="published")
THEIR_RATIO = RATIO.alike("the issue's ratio", _fitted_ratio, unit="", rows="published")
THEIR_RATIO_OVER_ROUNDOFFS = THEIR_RATIO.alike(estimate=partial(_over_roundoffs, _fitted_ratio))
DIVERGENCE = Measure(
    "mean Kullback-Leibler divergence of the cached from the uncached next-token distribution, in nats", "file",
    "model and dtype", "{:.2g}", rows="logits", by=_SERIES, estimate=mean("kl_nats"),
)
FLIPS = DIVERGENCE.alike("share of texts whose most probable next token changes", share("top1_flip"), form="{:.3f}")
KEPT = Measure(
    "share of prompts whose tokens under “{method}” equal those without a cache", "prompt", "dtype", rows="divergence",
    by=("dtype",), estimate=share("equal", "prompt"),
)
KEPT_IN_ALL = KEPT.alike(by=(), series="")
MENDED = Measure("runs of the posted loop that position ids mend", rows="divergence", estimate=total("equal"))
TIED = KEPT.alike("share of divergences of “{method}” at an exact tie", share("tied", "prompt"), rows="divergences")
GENERATE_WRITES = Measure(
    "share of prompts on which `generate` writes the loop's tokens", series="dtype", rows="generate and the loop",
    by=("dtype",), estimate=part("token"),
)
GENERATE_COMPUTES = GENERATE_WRITES.alike(
    "share of prompts on which `generate` has the loop's logits after the first step", part("logits")
)
UPCAST = Measure(
    "drift of the logits under a mitigation, over stock's", "file", "mitigation and dtype", rows="mitigated",
    by=("dtype", "variant"), over=("variant", STOCK), estimate=ratio_of_means("logits_relative_rms"),
)
STEP = UPCAST.alike("time of a decode step under a mitigation, over stock's", median_of_ratios("decode_s"))
PASS = UPCAST.alike("time of the full pass under a mitigation, over stock's", median_of_ratios("full_s"))
UPCAST_IDENTICAL = UPCAST.alike("share of texts with identical logits", share("identical"), over=None)
COST_OF_STEP, COST_OF_PASS = (
    one.alike(
        one.name.replace("mitigation", "mitigation that lowers the drift"), rows="mitigations that lower the drift"
    )
    for one in (STEP, PASS)
)

# Facts for the prose.
MODEL = noted("layer_drift", "models", 0, "name")
N_TOKENS = noted("layer_drift", "settings", "n_tokens")
N_NEW_TOKENS = noted("greedy_paths", "settings", "n_new_tokens")
TEXTS = Measure("texts", rows="layer_drift", estimate=distinct("sample"), form="{:.0f}")
PROMPTS = Measure("prompts", rows="greedy_paths", estimate=distinct("prompt"), form="{:.0f}")
MITIGATED_TEXTS = TEXTS.alike(rows="mitigations")
INNER_LAYERS = Measure("inner layers", rows="inner", by=("layer",), estimate=first("layer"), form="{:.0f}")
_CACHE_LENGTH = Measure(
    "positions that the cache holds at the end", rows="divergence", estimate=first("final_cache_length"), form="{:.0f}"
)
POSTED_LENGTH, LAST_LENGTH = (_CACHE_LENGTH.where(method=method) for method in (POSTED, LAST))
KEPT_BY_POSTED, KEPT_BY_LAST = (KEPT.where(method=method) for method in (POSTED, LAST))
TIES_OF_LAST = TIED.where(method=LAST)

_SIXTEEN_BITS = ("float16", "bfloat16")
_NO_GROWTH = Bound(0, "arithmetic", "no growth")
_TENTH = Bound(0.1, "ours", "one text in ten", "share")
# A divergence of 1e-6 nats moves no probability by more than 0.0008 (Pinsker's inequality).
_IMPERCEPTIBLE = Bound(1e-6, "ours", "nats that move no probability by more than 0.0008")
_QUARTER = Bound(1.25, "ours", "within a quarter", "ratio")
_HALF = Bound(0.5, "ours", "less than half", "ratio")
_NINETEEN_IN_TWENTY = Bound(0.95, "ours", "at least one prompt in twenty", "share")

STATEMENTS = {
    "every-dtype-drifts": here(DIFFERING, "above", HALF),
    "bf16-agrees-at-no-length": here(IDENTICAL.where(dtype="bfloat16"), "below", _TENTH, on="Intel"),
    "bf16-agrees-at-some-lengths": here(IDENTICAL.where(dtype="bfloat16"), "above", _TENTH, on="AMD"),
    "fp32-agrees-at-no-length": always(IDENTICAL.where(dtype="float32"), "below", _TENTH),
    "drift-grows": always(GROWTH, "above", _NO_GROWTH, headline=True),
    "relative-drift-grows": always(RELATIVE_GROWTH, "above", _NO_GROWTH),
    "growth-is-a-tenth": of_model(GROWTH, "below", Bound(0.15, "ours", "half as much again as the issue's 10 %")),
    "bf16-as-its-roundoff": always(RATIO_OVER_ROUNDOFFS.where(dtype="bfloat16"), "inside", _QUARTER),
    "fp16-less-than-its-roundoff": always(RATIO_OVER_ROUNDOFFS.where(dtype="float16"), "below", _HALF),
    "fp32-imperceptible": always(DIVERGENCE.where(dtype="float32"), "below", _IMPERCEPTIBLE, headline=True),
    "16-bits-are-above-it": always(DIVERGENCE.where(dtype=_SIXTEEN_BITS), "above", _IMPERCEPTIBLE),
    "flips-are-rare": always(FLIPS.where(dtype=("float32", "float16")), "below", _TENTH),
    "posted-loop-writes-other-text": always(KEPT_BY_POSTED, "below", HALF, headline=True),
    "positions-do-not-help": always(KEPT.where(method=POSITIONS), "below", HALF, headline=True),
    "last-token-helps": always(KEPT_BY_LAST.where(dtype=("float32", "float16")), "above", HALF, headline=True),
    "bf16-still-diverges": of_model(KEPT_BY_LAST.where(dtype="bfloat16"), "below", _NINETEEN_IN_TWENTY),
    "generate-writes-as-the-loop": of_model(GENERATE_WRITES, "at least", ALL),
    "generate-computes-as-the-loop": of_model(GENERATE_COMPUTES, "at least", ALL),
    "no-upcast-removes-it": of_model(UPCAST, "above", Bound(0.5, "ours", "half of the drift", "ratio")),
}


def _fits(measure: Measure, found: Found) -> str:
    """Say what the issue's own columns come to in the same arithmetic."""
    fits = (f"{one.series} {one.estimate.text(measure.form)}" for one in measure(found))
    return f"our fit to its columns: {'; '.join(fits)}"


def _why_no_mitigation(found: Found) -> str:
    return "stock shows 0 drift in these dtypes: there is none to remove" if found["mitigated"].empty else ""


def _why_no_cost(found: Found) -> str:
    lower = found["mitigations that lower the drift"]
    return _why_no_mitigation(found) or ("" if set(lower["variant"]) - {STOCK} else "no mitigation lowers the drift")


def _of_upcasts(found: Found) -> str:
    effects = UPCAST(found)
    less, more = sum(one.estimate.high < 1 for one in effects), sum(one.estimate.low > 1 for one in effects)
    best = min(effects, key=lambda one: one.estimate.value)
    return f"{less} of {len(effects)} lower the drift and {more} raise it by the whole interval; most by {best.series}"


def _on_cuda(found: Found) -> frozenset[str]:
    (run,) = found.behind("mitigations")
    return frozenset({_CUDA} if str(run.about["machine"]["device"]).startswith("cuda") else ())


def _texts_by_tokens(found: Found) -> str:
    texts = found["logits at all lengths"].groupby(["dtype", "model", "tokens"], sort=False)["differs"].mean()
    shares = (f"{model} {said(dtype)} {share:.0%} at {tokens}" for (dtype, model, tokens), share in texts.items())
    return f"texts that differ, by tokens: {', '.join(shares)}"


_CUDA = "a CUDA device"
_GREATLY = Bound(2, "ours", "“greatly” is twice", "ratio")
_NO_EFFECT = Bound(1.1, "ours", "a tenth more or less is no impact", "ratio")
# What lies above the bound on a divergence need not be noticed: another token is.
_ONE_IN_A_HUNDRED = Bound(0.01, "ours", "one prediction in a hundred is another token", "share")
_COSTLY = Bound(1.5, "ours", "“high” is half as much again", "ratio")
_FEW = Bound(0.1, "ours", "“often” is nine in ten", "share")
_MATCH = Bound(0, "document", "with them “the results exactly match”")
_POSTED, _WITH_POSITIONS, _LAST = (KEPT_IN_ALL.where(method=method) for method in (POSTED, POSITIONS, LAST))
CHECKS = {
    "drift-everywhere": claim(*either(DRIFTING, "above", HALF), beside=_texts_by_tokens),
    "grows-with-depth": claim(
        reproduced(every(GROWTH, "above", _NO_GROWTH), every(RELATIVE_GROWTH, "above", _NO_GROWTH)),
        refuted(anyone(GROWTH, "below", _NO_GROWTH)), refuted(anyone(RELATIVE_GROWTH, "below", _NO_GROWTH)),
        published=partial(_fits, THEIR_GROWTH),
    ),
    "coarser-is-worse": claim(*either(RATIO, "above", _GREATLY), published=partial(_fits, THEIR_RATIO)),
    "fp32-imperceptible": claim(
        reproduced(every(DIVERGENCE.where(dtype="float32"), "below", _IMPERCEPTIBLE)),
        refuted(anyone(FLIPS.where(dtype="float32"), "above", _ONE_IN_A_HUNDRED)),
    ),
    "sixteen-bits-matter": claim(
        reproduced(every(FLIPS.where(dtype=_SIXTEEN_BITS), "above", _ONE_IN_A_HUNDRED)),
        refuted(anyone(DIVERGENCE.where(dtype=_SIXTEEN_BITS), "below", _IMPERCEPTIBLE)),
    ),
    "positions-missing": claim(
        other_cause(every(_WITH_POSITIONS, "below", HALF), every(_LAST, "above", HALF)),
        reproduced(every(_WITH_POSITIONS, "above", HALF), every(_POSTED, "below", HALF)),
        refuted(every(MENDED.where(method=POSITIONS), "at most", _MATCH), one_is_enough=True),
    ),
    "greedy-keeps-its-choice": claim(reproduced(every(FLIPS, "below", _FEW)), refuted(anyone(FLIPS, "above", HALF))),
    "most-mitigations-idle": claim(
        reproduced(most(UPCAST, "inside", _NO_EFFECT)), refuted(most(UPCAST, "outside", _NO_EFFECT)),
        missing=_why_no_mitigation, beside=_of_upcasts,
    ),
    "mitigations-cost": claim(
        reproduced(every(COST_OF_PASS, "above", _COSTLY), every(COST_OF_STEP, "above", _COSTLY)),
        refuted(every(COST_OF_PASS, "below", _COSTLY), every(COST_OF_STEP, "below", _COSTLY)),
        needs=(_CUDA,), missing=_why_no_cost, has=_on_cuda,
    ),
}
CLAIMS = Claims("issue-25420", CHECKS)
