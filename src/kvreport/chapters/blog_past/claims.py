"""The claims of the blog post about past_key_values: each one's rule, and what of the rows it looks at."""

from collections.abc import Callable

import pandas as pd

from kvbook.measuring import estimates
from kvreport.chapters.blog_past import past_tables, tables
from kvreport.chapters.blog_past.results import Results
from kvreport.publishing.judging import Check, Evidence, Measured, fact, missing
from kvreport.publishing.rules import Bound, Quantity, Rule, every, other_cause, refuted, reproduced
from kvreport.publishing.verdicts import Claims, weights_of

_DIFFERENCE = (
    "difference of the last token's logits, root mean square in unit roundoffs of the dtype, or of fp16 if quantized"
)
# A sum over a few hundred numbers in each of a dozen layers gives tens of roundoffs; a missing context gives hundreds in
# the coarsest dtype.
ROUNDING = Bound(100, "ours", "more roundoffs than a dozen layers pile up")
NO_TEXT = Bound(0, "arithmetic", "in no text")


def _of(results: Results, family: str, variant: str, quantization: str | None = None) -> pd.DataFrame:
    """Choose rows of a family and its variant; of all quantizations where none is named."""
    rows = results.rows[(results.rows["family"] == family) & (results.rows["variant"] == variant)]
    return rows if quantization is None else rows[rows["quantization"] == quantization]


def _weights(results: Results, family: str) -> str:
    """Say whose weights a family's model has."""
    return weights_of(model for model in results.past.about["models"] if model["architecture"] == family)


def _mean(series: str, rows: pd.DataFrame, value: str = "roundoffs") -> Measured:
    return Measured(series, estimates.mean_resampled(rows, value), rows["source"].nunique())


def by(rows: pd.DataFrame, column: str, named: Callable[[object], str], value: str = "roundoffs") -> list[Measured]:
    """Estimate a column's mean for each value of another one."""
    return [_mean(named(key), part, value) for key, part in rows.groupby(column, sort=False)]


def _not_alone(rows: pd.DataFrame) -> Measured:
    """Count the texts whose logits are not those of the last token alone."""
    return fact((rows["alone_max_abs"] > 0).sum())


def _spread(rows: pd.DataFrame) -> str:
    return f"{rows['relative_spread'].median():.2g} of the logits' spread in the median"


def layers(count: object) -> str:
    """Write a number of layers."""
    return f"{count} layer{'s' * (count != 1)}"


def bits(quantization: object) -> str:
    """Write what the weights are stored in."""
    return {"4bit": "4 bits", "8bit": "8 bits", "none": "no quantization"}[str(quantization)]


NATIVE = Quantity(_DIFFERENCE, "text", form="{:,.3g}")


def _gpt2_compatible(results: Results) -> Evidence:
    rows = _of(results, "gpt2", past_tables.NATIVE, "none")
    if rows.empty:
        return missing("stand-in", "0 runs of GPT-2 without quantization")
    return Evidence(_weights(results, "gpt2"), {NATIVE: [_mean("", rows)]}, _spread(rows))


HANDED = Quantity(f"with a past handed over, several layers deep, {_DIFFERENCE}", "text", "depth", "{:,.3g}")
CAUSAL = Quantity(f"made causal, {_DIFFERENCE}", "text", form="{:,.3g}")


def _roberta_fails_bidirectional(results: Results) -> Evidence:
    handed = _of(results, "roberta", past_tables.HANDED)
    causal = _of(results, "roberta", past_tables.DECODER)
    # In one layer nothing lies above the keys that a later token would have changed.
    handed = handed[handed["layers"] > 1]
    if handed.empty or causal.empty:
        return missing("stand-in", "0 runs of RoBERTa with a past handed over, or made causal")
    found = {HANDED: by(handed, "layers", layers), CAUSAL: [_mean("", causal)]}
    return Evidence(_weights(results, "roberta"), found)


_THOUSANDTH = Bound(0.001, "document", "“at most 0.1%”")
RELATIVE = Quantity(
    "difference of a quantized model's logits over the logits, root mean squares",
    "text",
    "model and precision",
    "{:.2g}",
)


def _quantization_keeps_past(results: Results) -> Evidence:
    rows = results.rows[(results.rows["variant"] == past_tables.NATIVE) & (results.rows["quantization"] != "none")]
    if rows.empty:
        return missing("stand-in", "0 runs of a quantized model")
    # The post says it of GPT-2 in 4 bits and claims the technique, which is asked of all that was quantized.
    found = [
        _mean(f"{model} in {bits(kind)}", part, "relative_rms")
        for (model, kind), part in rows.groupby(["model", "quantization"], sort=False)
    ]
    weights = weights_of(model for model in results.past.about["models"] if model["name"] in set(rows["model"]))
    beyond = ", ".join(
        f"{one.series} {one.estimate.value:.2%}" for one in found if one.estimate.low > _THOUSANDTH.value
    )
    return Evidence(weights, {RELATIVE: found}, f"above the bound: {beyond or 'none'}")


OFF = Quantity("texts in which MPT with use_cache off differs from the last token alone", form="{:.0f}")
ON = Quantity(f"with use_cache on, {_DIFFERENCE}", "text", "quantization", "{:,.3g}")


def _mpt_cannot(results: Results) -> Evidence:
    off, on = _of(results, "mpt", past_tables.CACHE_OFF), _of(results, "mpt", past_tables.NATIVE)
    if off.empty:
        return missing("stand-in", "0 runs of MPT")
    found = {OFF: [_not_alone(off)], ON: by(on, "quantization", bits)}
    return Evidence(_weights(results, "mpt"), found, f"of {len(off)} texts and quantizations; off, {_spread(off)}")


TODAY = Quantity(f"Falcon as it is today, {_DIFFERENCE}", "text", "quantization", "{:,.3g}")
MASK = Quantity(f"with the mask of mid-2023, {_DIFFERENCE}", "text", "quantization", "{:,.3g}")
ROTARY = Quantity(f"with the rotary embedding of mid-2023, {_DIFFERENCE}", "text", "quantization", "{:,.3g}")


def _falcon_cannot(results: Results) -> Evidence:
    native = _of(results, "falcon", past_tables.NATIVE)
    if native.empty:
        return missing("stand-in", "0 runs of Falcon")
    variants = {TODAY: past_tables.NATIVE, MASK: past_tables.UPPER_LEFT, ROTARY: past_tables.NO_OFFSET}
    found = {quantity: by(_of(results, "falcon", name), "quantization", bits) for quantity, name in variants.items()}
    return Evidence(_weights(results, "falcon"), found, _four_over_eight(results))


def _four_over_eight(results: Results) -> str:
    """Say whether our Falcon of mid-2023 has the ratio of the post's two tables."""

    def ratio(table: pd.DataFrame) -> str:
        means = table[(table["family"] == "falcon") & (table["statistic"] == "mean")].set_index("quantization")[
            "absolute"
        ]
        return f"{means['4bit'] / means['8bit']:.1f}" if {"4bit", "8bit"} <= set(means.index) else "not run"

    theirs, ours = ratio(tables.published_tables()), ratio(results.own)
    return f"mean difference in 4 bits over that in 8 bits: published {theirs}, here {ours}"


def _cannot(native: Quantity, *conditions, unseen: str) -> Rule:
    """A family cannot use its past: true where it fails natively, another cause where only a switch makes it fail."""
    return Rule(
        (
            other_cause(every(native, "below", ROUNDING), *conditions),
            reproduced(every(native, "above", ROUNDING)),
            refuted(every(native, "below", ROUNDING)),
        ),
        unseen=unseen,
    )


CHECKS = {
    "gpt2-compatible": Check(
        Rule((reproduced(every(NATIVE, "below", ROUNDING)), refuted(every(NATIVE, "above", ROUNDING)))),
        _gpt2_compatible,
    ),
    "roberta-fails-bidirectional": Check(
        Rule(
            (
                reproduced(every(HANDED, "above", ROUNDING), every(CAUSAL, "below", ROUNDING)),
                refuted(every(HANDED, "below", ROUNDING)),
            )
        ),
        _roberta_fails_bidirectional,
    ),
    "quantization-keeps-past": Check(
        Rule((reproduced(every(RELATIVE, "below", _THOUSANDTH)), refuted(every(RELATIVE, "above", _THOUSANDTH)))),
        _quantization_keeps_past,
    ),
    "mpt-cannot": Check(
        _cannot(
            ON, every(OFF, "at most", NO_TEXT), unseen="the post does not print the configuration of its checkpoint"
        ),
        _mpt_cannot,
    ),
    "falcon-cannot": Check(
        _cannot(
            TODAY,
            every(MASK, "above", ROUNDING),
            every(ROTARY, "above", ROUNDING),
            unseen="that the post ran the code of mid-2023 is taken from its date, and the ratio of its two tables is open",
        ),
        _falcon_cannot,
    ),
}

CLAIMS = Claims("blog-past", CHECKS)
