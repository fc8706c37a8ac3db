"""The numbers and statements of the chapter on issue 25420."""

from collections.abc import Callable, Mapping

import pandas as pd

from kvbook.measuring import estimates
from kvbook.runs.records import Run
from kvreport.chapters.layer_drift import claims, greedy_paths, results, tables
from kvreport.chapters.layer_drift.results import Results
from kvreport.publishing.judging import Measured, fact, with_units
from kvreport.publishing.rules import HALF, Bound, Condition, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import DTYPES, between, power_of_ten

EXPERIMENTS = results.EXPERIMENTS
_NONE = Bound(0, "arithmetic", "no growth")
_ALL = Bound(1, "arithmetic", "all")
_TENTH = Bound(0.1, "ours", "one text in ten", "share")


def comparable(runs: Mapping[str, Run]) -> dict[str, Run]:
    """Take the trained model's drift for the published one's counterpart, where a run has it."""
    trained = runs.get("layer_drift_trained")
    return {**runs, "layer_drift": trained} if trained else dict(runs)


def _has_drift(measure: Callable[[Results], list[Measured]]) -> Callable[[Results], list[Measured]]:
    return lambda found: measure(found) if found.drift else []


def _differing(found: Results) -> list[Measured]:
    return claims.shares(claims.logits(found), "differing_share")


def _identical(dtype: str) -> Callable[[Results], list[Measured]]:
    """Measure the share of texts of drawn lengths whose logits are bitwise identical."""

    def measure(found: Results) -> list[Measured]:
        if found.lengths is None:
            return []
        rows = found.lengths.rows
        rows = rows[(rows["place"] == "logits") & (rows["dtype"] == dtype)]
        return [Measured(DTYPES[dtype], *estimates.share_over(rows, rows["differing_share"] == 0))]

    return measure


def _growth(of: str) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        units = found.drift.rows["source"].nunique()
        return [Measured(DTYPES[row.dtype], row.sampling, units) for row in getattr(found, of).itertuples()]

    return _has_drift(measure)


def _ratio(coarse: str, fine: str, over: float = 1) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        units = found.drift.rows["source"].nunique()
        rows = found.ratios[(found.ratios["coarse"] == coarse) & (found.ratios["fine"] == fine)]
        return [
            Measured(row.model, estimates.Estimate(*(end / over for end in (e.value, e.low, e.high)), e.kind), units)
            for row in rows.itertuples()
            for e in [row.sampling]
        ]

    return _has_drift(measure)


def _divergence(*dtypes: str) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        return [
            Measured(name, estimates.mean_resampled(rows, "kl_nats"), rows["source"].nunique())
            for name, rows in claims.series(claims.logits(found, *dtypes))
        ]

    return _has_drift(measure)


def _flips(*dtypes: str) -> Callable[[Results], list[Measured]]:
    return _has_drift(lambda found: claims.shares(claims.logits(found, *dtypes), "top1_flip"))


def _equal(method: str, *dtypes: str) -> Callable[[Results], list[Measured]]:
    """Measure in how many prompts a method writes the tokens that are written without a cache."""

    def measure(found: Results) -> list[Measured]:
        if found.greedy is None:
            return []
        table = found.divergence
        rows = table[(table["method"] == method) & (table["dtype"].isin(dtypes) if dtypes else True)]
        return [
            Measured(DTYPES[dtype], *estimates.share_over(of, of["equal"], "prompt"))
            for dtype, of in rows.groupby("dtype", sort=False)
        ]

    return measure


def _generate_as_the_loop(column: str) -> Callable[[Results], list[Measured]]:
    """Measure on how many prompts `generate` has the tokens, or the logits, of the loop that feeds only the new token."""

    def measure(found: Results) -> list[Measured]:
        if found.greedy is None:
            return []
        rows = tables.steps_as(found.greedy.rows, greedy_paths.GENERATE, LAST)
        return [fact(of[column].mean(), DTYPES[dtype]) for dtype, of in rows.groupby("dtype", sort=False)]

    return measure


def _share(method: str) -> Quantity:
    return Quantity(f"share of prompts whose tokens under “{method}” equal those without a cache", "prompt", "dtype")


_IDENTICAL = Quantity("share of texts of drawn lengths whose logits are bitwise identical", "file", "dtype")
_TIMES = Quantity("drift of bf16 over that of fp16, over the ratio of their roundoffs", "file", "model")
_LESS = Quantity("drift of fp16 over that of fp32, over the ratio of their roundoffs", "file", "model")
POSTED, POSITIONS, LAST, LAST_POSITIONS = greedy_paths.LOOPS


def _left_by_upcasts(found: Results) -> list[Measured]:
    """Measure what each upcast leaves of the drift, by dtype."""
    if found.mitigated is None:
        return []
    units = found.mitigated.rows["source"].nunique()
    return [
        Measured(f"{row.variant}, {DTYPES[row.dtype]}", row.drift_ratio, units) for row in found.effects.itertuples()
    ]


STATEMENTS: dict[str, Statement[Results]] = {
    "every-dtype-drifts": Statement(
        every(claims.DIFFERING, "above", HALF), _has_drift(_differing), scope="this processor"
    ),
    "bf16-agrees-at-no-length": Statement(
        every(_IDENTICAL, "below", _TENTH), _identical("bfloat16"), scope="this processor", on="Intel"
    ),
    "bf16-agrees-at-some-lengths": Statement(
        every(_IDENTICAL, "above", _TENTH), _identical("bfloat16"), scope="this processor", on="AMD"
    ),
    "fp32-agrees-at-no-length": Statement(every(_IDENTICAL, "below", _TENTH), _identical("float32")),
    "drift-grows": Statement(every(claims.GROWTH, "above", _NONE), _growth("growth"), headline=True),
    "relative-drift-grows": Statement(every(claims.RELATIVE_GROWTH, "above", _NONE), _growth("relative_growth")),
    "growth-is-a-tenth": Statement(
        every(claims.GROWTH, "below", Bound(0.15, "ours", "half as much again as the issue's 10 %")),
        _growth("growth"),
        scope="this model",
    ),
    "bf16-as-its-roundoff": Statement(
        every(_TIMES, "inside", Bound(1.25, "ours", "within a quarter", "ratio")), _ratio("bfloat16", "float16", 8)
    ),
    "fp16-less-than-its-roundoff": Statement(
        every(_LESS, "below", Bound(0.5, "ours", "less than half", "ratio")), _ratio("float16", "float32", 8192)
    ),
    "fp32-imperceptible": Statement(
        every(claims.DIVERGENCE, "below", claims.IMPERCEPTIBLE), _divergence("float32"), headline=True
    ),
    "16-bits-are-above-it": Statement(
        every(claims.DIVERGENCE, "above", claims.IMPERCEPTIBLE), _divergence("float16", "bfloat16")
    ),
    "flips-are-rare": Statement(
        every(claims.FLIPS, "below", _TENTH), _flips("float32", "float16")
    ),
    "posted-loop-writes-other-text": Statement(every(_share(POSTED), "below", HALF), _equal(POSTED), headline=True),
    "positions-do-not-help": Statement(every(_share(POSITIONS), "below", HALF), _equal(POSITIONS), headline=True),
    "last-token-helps": Statement(
        every(_share(LAST), "above", HALF), _equal(LAST, "float32", "float16"), headline=True
    ),
    "bf16-still-diverges": Statement(
        Condition(_share(LAST), "below", Bound(0.95, "ours", "at least one prompt in twenty", "share")),
        _equal(LAST, "bfloat16"),
        scope="this model",
    ),
    "generate-writes-as-the-loop": Statement(
        every(Quantity("share of prompts on which `generate` writes the loop's tokens", series="dtype"), "at least", _ALL),
        _generate_as_the_loop("token"),
        scope="this model",
    ),
    "generate-computes-as-the-loop": Statement(
        every(
            Quantity("share of prompts on which `generate` has the loop's logits after the first step", series="dtype"),
            "at least", _ALL,
        ),
        _generate_as_the_loop("logits_sha256"),
        scope="this model",
    ),
    "no-upcast-removes-it": Statement(
        every(
            Quantity("drift of the logits with one upcast, over stock's", "file", "upcast and dtype"), "above",
            Bound(0.5, "ours", "half of the drift", "ratio"),
        ),
        _left_by_upcasts,
        scope="this model",
    ),
}  # fmt: skip


def _fitted(table: pd.DataFrame, form: str) -> str:
    return between((row.sampling.value for row in table.itertuples()), form)


def _published(found: Results, part: int, form: str, **where: str) -> str:
    rows = found.published_fits[part]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return between((row.fit.value for row in rows.itertuples()), form)


def _one(measure: Callable[[Results], list[Measured]], form: str) -> Callable[[Results], str]:
    return lambda found: ", ".join(measured.estimate.text(form) for measured in measure(found))


def _count(method: str, dtype: str) -> Callable[[Results], str]:
    def give(found: Results) -> str:
        rows = found.divergence[(found.divergence["method"] == method) & (found.divergence["dtype"] == dtype)]
        return f"{int(rows['equal'].sum())} of {len(rows)}"

    return give


def _ties(dtype: str) -> Callable[[Results], str]:
    """Count divergences of the loop that feeds only the new token, and those among them at an exact tie."""

    def give(found: Results) -> str:
        rows = found.divergence[(found.divergence["method"] == LAST) & (found.divergence["dtype"] == dtype)]
        tied = rows["tied"].dropna()
        return f"{int(tied.sum())} of {len(tied)}"

    return give


def _divergence_said(dtype: str) -> Callable[[Results], str]:
    return lambda found: power_of_ten(_divergence(dtype)(found)[0].estimate.value)


def _cache_length(method: str) -> Callable[[Results], str]:
    def give(found: Results) -> str:
        rows = found.divergence[found.divergence["method"] == method]
        return str(int(rows["final_cache_length"].iloc[0]))

    return give


_CODELLAMA = "codellama/CodeLlama-7b-hf"
NUMBERS: dict[str, Callable[[Results], str]] = {
    "n_mitigated": lambda found: str(found.mitigated.rows["sample"].nunique()) if found.mitigated else "not run",
    "model": lambda found: found.drift.about["models"][0]["name"],
    "n_texts": lambda found: str(found.drift.rows["sample"].nunique()),
    "n_tokens": lambda found: str(found.drift.about["settings"]["n_tokens"]),
    "n_prompts": lambda found: str(found.greedy.rows["prompt"].nunique()),
    "n_new_tokens": lambda found: str(found.greedy.about["settings"]["n_new_tokens"]),
    "inner_layers": lambda found: between(tables.inner(found.drift.rows)["layer"], "{}"),
    "growth": lambda found: _fitted(found.growth, "{:.0%}"),
    "relative_growth": lambda found: _fitted(found.relative_growth, "{:.0%}"),
    "their_growth": lambda found: _published(found, 0, "{:.0%}", model=_CODELLAMA),
    "their_growth_gpt2": lambda found: _published(found, 0, "{:.0%}", model="gpt2"),
    "bf16_fp16": _one(_ratio("bfloat16", "float16"), "{:.1f}"),
    "their_bf16_fp16": lambda found: _published(found, 1, "{:.1f}", coarse="bfloat16"),
    "fp16_fp32": lambda found: ", ".join(
        one.estimate.in_two_digits().text("{:,.0f}") for one in _ratio("float16", "float32")(found)
    ),
    "their_fp16_fp32": lambda found: _published(found, 1, "{:,.0f}", fine="float32"),
    **{f"kl_{DTYPES[dtype]}": _divergence_said(dtype) for dtype in ("float32", "float16", "bfloat16")},
    "flips_bf16": _one(_flips("bfloat16"), "{:.1%}"),
    **{f"equal_{DTYPES[dtype]}": _count(LAST, dtype) for dtype in ("float32", "float16", "bfloat16")},
    **{f"ties_{DTYPES[dtype]}": _ties(dtype) for dtype in ("float16", "bfloat16")},
    "posted_fp32": _count(POSTED, "float32"),
    "posted_fp32_share": lambda found: with_units(_equal(POSTED, "float32")(found), "prompts"),
    "equal_fp32_share": lambda found: with_units(_equal(LAST, "float32")(found), "prompts"),
    "posted_length": _cache_length(POSTED),
    "last_length": _cache_length(LAST),
}
