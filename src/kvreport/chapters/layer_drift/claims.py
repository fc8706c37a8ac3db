"""The claims of issue 25420: for each the rule by which it is judged, and what of the rows it looks at."""

import itertools
from collections.abc import Iterator

import pandas as pd

from kvbook import lengths
from kvbook.measuring import agreement, estimates
from kvreport.chapters.layer_drift import greedy_paths
from kvreport.chapters.layer_drift.results import Results
from kvreport.publishing.judging import UNFITTED, Check, Evidence, Measured, fact, missing
from kvreport.publishing.rules import (
    HALF,
    Bound,
    Quantity,
    Rule,
    anyone,
    every,
    most,
    other_cause,
    refuted,
    reproduced,
)  # fmt: skip
from kvreport.publishing.verdicts import Claims, weights_of
from kvreport.publishing.wording import DTYPES

_SERIES = "model and dtype"
_NONE = Bound(0, "arithmetic", "no change")
# A divergence of 1e-6 nats moves no probability by more than 0.0008 (Pinsker's inequality).
IMPERCEPTIBLE = Bound(1e-6, "ours", "nats that move no probability by more than 0.0008")
# What lies above that bound need not be noticed: another token is.
_ONE_IN_A_HUNDRED = Bound(0.01, "ours", "one prediction in a hundred is another token", "share")
_NO_EFFECT = Bound(1.1, "ours", "a tenth more or less is no impact", "ratio")


def _weights(results: Results) -> str:
    return weights_of(results.drift.about["models"])


def logits(results: Results, *dtypes: str) -> pd.DataFrame:
    """Give the rows of the logits, of some dtypes or of all."""
    rows = results.drift.rows[results.drift.rows["place"] == "logits"]
    return rows[rows["dtype"].isin(dtypes)] if dtypes else rows


def series(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Go through models and dtypes, each with its name and rows."""
    for (model, dtype), some in rows.groupby(["model", "dtype"], sort=False):
        yield f"{model} {DTYPES[dtype]}", some


def shares(rows: pd.DataFrame, column: str) -> list[Measured]:
    """Give the share of files in which a column is above 0, for each model and dtype."""
    return [Measured(name, *estimates.share_over(some, some[column] > 0)) for name, some in series(rows)]


DIFFERING = Quantity("share of texts whose logits differ in a bit", "file", _SERIES)
# The claim is on models, so one model says nothing of it, however many texts it reads.
DRIFTING = Quantity(
    "share of models in which the logits of more than half of the texts differ in a bit", "model", "dtype"
)


def _drift_everywhere(results: Results) -> Evidence:
    # The share depends on the length: at some, a step of one row has the full pass's bits.
    rows = pd.concat(
        run.rows[run.rows["place"] == "logits"].assign(
            tokens=lengths.said(run.about.get("lengths", run.about["settings"]["n_tokens"]))
        )
        for run in results.of_lengths
    )
    differing = (rows["differing_share"] > 0).groupby([rows["dtype"], rows["model"], rows["tokens"]], sort=False).mean()
    drifts = (differing > 0.5).groupby(["dtype", "model"], sort=False).all().rename("drifts").reset_index()
    found = [
        Measured(DTYPES[dtype], *estimates.share_over(models, models["drifts"], "model"))
        for dtype, models in drifts.groupby("dtype", sort=False)
    ]
    said = (f"{model} {DTYPES[dtype]} {share:.0%} at {tokens}" for (dtype, model, tokens), share in differing.items())
    return Evidence(_weights(results), {DRIFTING: found}, f"texts that differ, by tokens: {', '.join(said)}")


GROWTH = Quantity("growth per layer of the absolute drift", "file", _SERIES, "{:+.1%}")
RELATIVE_GROWTH = Quantity("growth per layer of the relative drift", "file", _SERIES, "{:+.1%}")


def _grows_with_depth(results: Results) -> Evidence:
    theirs, _ = results.published_fits
    published = "our fit to its columns, per layer: " + "; ".join(
        f"{r.model.split('/')[-1]} {DTYPES[r.dtype]} {r.fit.text('{:+.1%}')}" for r in theirs.itertuples()
    )
    rows = results.drift.rows
    if results.growth.empty:
        return missing(_weights(results), "no series drifts in every layer from 2 on", published)

    def grown(table: pd.DataFrame) -> list[Measured]:
        fitted = {(r.model, r.dtype): r.sampling for r in table.itertuples()}
        series = rows.groupby(["model", "dtype"], sort=False)["source"].nunique()
        return [
            Measured(f"{model} {DTYPES[dtype]}", fitted.get((model, dtype), UNFITTED), units)
            for (model, dtype), units in series.items()
        ]

    found = {GROWTH: grown(results.growth), RELATIVE_GROWTH: grown(results.relative_growth)}
    return Evidence(_weights(results), found, published=published)


RATIO = Quantity("drift of a dtype over that of the next finer one", "file", "model and pair of dtypes", "{:,.2g}")


def _coarser_is_worse(results: Results) -> Evidence:
    _, theirs = results.published_fits
    published = "our fit to its columns: " + "; ".join(
        f"{r.model.split('/')[-1]} {DTYPES[r.coarse]} / {DTYPES[r.fine]} {r.fit.text('{:,.3g}')}"
        for r in theirs.itertuples()
    )
    rows = results.drift.rows
    fitted = {(r.model, r.coarse, r.fine): r.sampling for r in results.ratios.itertuples()}
    if not fitted:
        return missing(_weights(results), "fewer than 2 dtypes drift in every layer from 2 on", published)
    found = []
    for model, of_model in rows.groupby("model", sort=False):
        dtypes = sorted(of_model["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)
        found += [
            Measured(
                f"{model} {DTYPES[coarse]} / {DTYPES[fine]}",
                fitted.get((model, coarse, fine), UNFITTED),
                of_model["source"].nunique(),
            )
            for fine, coarse in itertools.pairwise(dtypes)
        ]
    return Evidence(_weights(results), {RATIO: found}, published=published)


DIVERGENCE = Quantity(
    "mean Kullback-Leibler divergence of the cached from the uncached next-token distribution, in nats", "file",
    _SERIES, "{:.2g}",
)  # fmt: skip


FLIPS = Quantity("share of texts whose most probable next token changes", "file", _SERIES, "{:.3f}")


def _noticed(results: Results, *dtypes: str) -> Evidence:
    rows = logits(results, *dtypes)
    found = {
        DIVERGENCE: [
            Measured(name, estimates.mean_resampled(some, "kl_nats"), some["source"].nunique())
            for name, some in series(rows)
        ],
        FLIPS: shares(rows, "top1_flip"),
    }
    return Evidence(_weights(results), found, missing="" if len(rows) else f"none of {', '.join(dtypes)} was run")


def _fp32_imperceptible(results: Results) -> Evidence:
    return _noticed(results, "float32")


def _sixteen_bits_matter(results: Results) -> Evidence:
    return _noticed(results, "float16", "bfloat16")


def _equal_share(method: str) -> Quantity:
    return Quantity(f"share of runs of “{method}” whose tokens equal those without a cache", "prompt", form="{:.2f}")


MENDED = {name: _equal_share(name) for name in greedy_paths.LOOPS}
_POSTED, _WITH_POSITIONS, _LAST, _ = MENDED.values()


MENDED_RUNS = Quantity("runs of the posted loop that position ids mend")


def _positions_missing(results: Results) -> Evidence:
    table = results.divergence
    # Models and dtypes read the same prompts, so prompts are counted.
    rows = {name: table[table["method"] == name] for name in greedy_paths.LOOPS}
    found = {
        quantity: [Measured("", *estimates.share_over(rows[name], rows[name]["equal"], "prompt"))]
        for name, quantity in MENDED.items()
    }
    mended = rows["cache, as posted + position ids"]["equal"]
    found[MENDED_RUNS] = [fact(mended.sum())]
    return Evidence(_weights(results), found, f"{len(mended)} runs of each loop: prompts, models and dtypes")


def _greedy_keeps_its_choice(results: Results) -> Evidence:
    return Evidence(_weights(results), {FLIPS: shares(logits(results), "top1_flip")})


UPCAST = Quantity("drift of the logits under a mitigation, over stock's", "file", "mitigation and dtype")
FULL = Quantity(
    "time of the full pass under a mitigation that lowers the drift, over stock's", "file", "mitigation and dtype"
)
DECODE = Quantity("time of a decode step under it, over stock's", "file", "mitigation and dtype")
CUDA = "a CUDA device"


def _mitigations(results: Results) -> str:
    """Say why nothing was measured, or nothing."""
    if results.mitigated is None:
        return "0 rows: no model of Llama's classes, or no 16-bit dtype"
    return "stock shows 0 drift in these dtypes: there is none to remove" if results.effects.empty else ""


def _ratios(results: Results, table: pd.DataFrame, column: str) -> list[Measured]:
    units = results.mitigated.rows["source"].nunique()
    return [Measured(f"{r['variant']} {DTYPES[r['dtype']]}", r[column], units) for _, r in table.iterrows()]


def _upcasts(results: Results) -> Evidence:
    if why := _mitigations(results):
        return missing(_weights(results), why)
    ratios = results.effects["drift_ratio"]
    less, more = int(ratios.map(lambda e: e.high < 1).sum()), int(ratios.map(lambda e: e.low > 1).sum())
    best = results.effects.loc[ratios.map(lambda e: e.value).idxmin()]
    beside = (
        f"{less} of {len(ratios)} lower the drift and {more} raise it by the whole interval; best: {best['variant']} in "
        f"{DTYPES[best['dtype']]}, logits equal in {best['equal_share'].value:.0%} of samples"
    )
    return Evidence(_weights(results), {UPCAST: _ratios(results, results.effects, "drift_ratio")}, beside)


def _mitigations_cost(results: Results) -> Evidence:
    if why := _mitigations(results):
        return missing(_weights(results), why)
    lower = results.effects[results.effects["drift_ratio"].map(lambda e: e.high < 1)]
    if lower.empty:
        return missing(_weights(results), f"0 of {len(results.effects)} mitigations lower the drift")
    cuda = str(results.mitigated.about["machine"]["device"]).startswith("cuda")
    found = {FULL: _ratios(results, lower, "full_ratio"), DECODE: _ratios(results, lower, "decode_ratio")}
    return Evidence(_weights(results), found, has=frozenset({CUDA} if cuda else ()))


_GREATLY = Bound(2, "ours", "“greatly” is twice", "ratio")
_COSTLY = Bound(1.5, "ours", "“high” is half as much again", "ratio")
_FEW_FLIPS = Bound(0.1, "ours", "“often” is nine in ten", "share")

CHECKS = {
    "drift-everywhere": Check(
        Rule((reproduced(every(DRIFTING, "above", HALF)), refuted(anyone(DRIFTING, "below", HALF)))),
        _drift_everywhere,
    ),
    "grows-with-depth": Check(
        Rule(
            (
                reproduced(every(GROWTH, "above", _NONE), every(RELATIVE_GROWTH, "above", _NONE)),
                refuted(anyone(GROWTH, "below", _NONE)),
                refuted(anyone(RELATIVE_GROWTH, "below", _NONE)),
            )
        ),
        _grows_with_depth,
    ),
    "coarser-is-worse": Check(
        Rule((reproduced(every(RATIO, "above", _GREATLY)), refuted(anyone(RATIO, "below", _GREATLY)))),
        _coarser_is_worse,
    ),
    "fp32-imperceptible": Check(
        Rule(
            (
                reproduced(every(DIVERGENCE, "below", IMPERCEPTIBLE)),
                refuted(anyone(FLIPS, "above", _ONE_IN_A_HUNDRED)),
            )
        ),
        _fp32_imperceptible,
    ),
    "sixteen-bits-matter": Check(
        Rule(
            (
                reproduced(every(FLIPS, "above", _ONE_IN_A_HUNDRED)),
                refuted(anyone(DIVERGENCE, "below", IMPERCEPTIBLE)),
            )
        ),
        _sixteen_bits_matter,
    ),
    "positions-missing": Check(
        Rule(
            (
                other_cause(every(_WITH_POSITIONS, "below", HALF), every(_LAST, "above", HALF)),
                reproduced(every(_WITH_POSITIONS, "above", HALF), every(_POSTED, "below", HALF)),
                refuted(
                    every(MENDED_RUNS, "at most", Bound(0, "document", "with them “the results exactly match”")),
                    one_is_enough=True,
                ),
            )
        ),
        _positions_missing,
    ),
    "greedy-keeps-its-choice": Check(
        Rule((reproduced(every(FLIPS, "below", _FEW_FLIPS)), refuted(anyone(FLIPS, "above", HALF)))),
        _greedy_keeps_its_choice,
    ),
    "most-mitigations-idle": Check(
        Rule((reproduced(most(UPCAST, "inside", _NO_EFFECT)), refuted(most(UPCAST, "outside", _NO_EFFECT)))),
        _upcasts,
    ),
    "mitigations-cost": Check(
        Rule(
            (
                reproduced(every(FULL, "above", _COSTLY), every(DECODE, "above", _COSTLY)),
                refuted(every(FULL, "below", _COSTLY), every(DECODE, "below", _COSTLY)),
            ),
            needs=(CUDA,),
        ),
        _mitigations_cost,
    ),
}

CLAIMS = Claims("issue-25420", CHECKS)
