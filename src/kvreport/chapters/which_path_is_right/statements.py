"""The numbers and statements of the chapter on which path is right."""

import dataclasses
from collections.abc import Callable

import pandas as pd

from kvbook.measuring import estimates
from kvbook.measuring.estimates import two_digits
from kvreport.chapters.which_path_is_right import path_errors, results, tables
from kvreport.chapters.which_path_is_right.results import Results
from kvreport.publishing.judging import UNFITTED, Measured, fact
from kvreport.publishing.rules import Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import DTYPES, power_of_ten

EXPERIMENTS = results.EXPERIMENTS
_SERIES = "model and dtype"
_SIXTEEN = ("float16", "bfloat16")
_NONE = Bound(0, "arithmetic", "nothing in common")
_QUARTER = Bound(1.25, "ours", "within a quarter", "ratio")


def _of(
    table: str, column: str, *dtypes: str, path: str | None = path_errors.CACHED
) -> Callable[[Results], list[Measured]]:
    """Measure a column of estimates of a path, in these dtypes or in all."""

    def measure(found: Results) -> list[Measured]:
        rows: pd.DataFrame = getattr(found, table)
        rows = rows[rows["dtype"].isin(dtypes)] if dtypes else rows
        rows = rows[rows["path"] == path] if path else rows
        return [
            Measured(f"{row.model} {DTYPES[row.dtype]}", getattr(row, column) or UNFITTED, found.files[row.model])
            for row in rows.itertuples()
        ]

    return measure


def _coarser(found: Results) -> list[Measured]:
    """Measure by how much the uncached error grows from fp32 to bf16, text by text."""
    measured = []
    for model, texts in found.texts[found.texts["path"] == path_errors.CACHED].groupby("model", sort=False):
        errors = texts.pivot_table(index=["sample", "source"], columns="dtype", values="error_full")
        if {"float32", "bfloat16"} <= set(errors):
            both = errors.assign(times=errors["bfloat16"] / errors["float32"]).reset_index()
            measured.append(Measured(model, estimates.log_mean_resampled(both, "times"), found.files[model]))
    return measured


def _tried(path: str) -> Callable[[Results], list[Measured]]:
    """Measure the error of a path of the reference, over the smallest error that it is to measure."""

    def measure(found: Results) -> list[Measured]:
        table = found.reference.set_index(["model", "compared with the reference"])["logits"].unstack()
        smallest = table[[path_errors.CACHED, "no cache"]].min(axis=1)
        return [fact(table.loc[model, path] / smallest[model], model) for model in table.index]

    return measure


_RATIO = Quantity("error of the logits against fp64, over the stock uncached pass's", "file", _SERIES)
_APART = Quantity("distance of the two paths, over the root mean square of their errors", "file", _SERIES)
_DIRECTION = "mean change against the stock uncached pass, over its root mean square"

STATEMENTS: dict[str, Statement[Results]] = {
    "cached-no-worse": Statement(
        every(_RATIO, "below", _QUARTER), _of("series", "ratio"), scope="this model", headline=True
    ),
    "as-close-in-16-bits": Statement(
        every(_RATIO, "inside", _QUARTER), _of("series", "ratio", *_SIXTEEN), scope="this model", headline=True
    ),
    "closer-in-fp32-here": Statement(
        every(_RATIO, "below", Bound(0.8, "ours", "a fifth smaller", "ratio")), _of("series", "ratio", "float32"),
        scope="this processor", headline=True,
    ),
    "eager-as-much": Statement(
        every(_RATIO, "inside", _QUARTER),
        _of("series", "ratio", path=path_errors.EAGER),
        scope="this model",
        headline=True,
    ),
    "either-may-be-closer": Statement(
        every(
            Quantity("share of texts in which the cached pass is the closer one", "file", _SERIES),
            "above",
            Bound(0.25, "ours", "one text in four", "share"),
        ),
        _of("series", "closer", *_SIXTEEN),
        scope="this model",
    ),
    "dtype-decides": Statement(
        every(
            Quantity("error of the uncached pass in bf16, over that in fp32", "file", "model", "{:.2g}"),
            "above",
            Bound(1000, "ours", "three orders of magnitude"),
        ),
        _coarser,
        headline=True,
    ),
    "control-is-seen": Statement(
        every(dataclasses.replace(_RATIO, form="{:.2g}"), "above", Bound(5, "ours", "five times", "ratio")),
        _of("series", "ratio", path=path_errors.OFF_BY_ONE),
    ),
    "no-growth-along-the-text": Statement(
        every(
            Quantity("factor by which that ratio changes from the first scored position to the last", "file", _SERIES),
            "below",
            _QUARTER,
        ),
        _of("slopes", "change", path=None),
    ),
    "errors-share-a-part": Statement(
        every(Quantity("correlation of the two errors of the logits", "file", _SERIES), "above", _NONE),
        _of("series", "correlation"),
    ),
    "drift-is-less-than-of-independent-errors": Statement(
        every(_APART, "below", Bound(tables.INDEPENDENT, "arithmetic", "independent errors of one size")),
        _of("series", "apart"),
    ),
    "loss-unchanged": Statement(
        every(
            Quantity("difference of the mean negative log likelihood, nats per token", "file", _SERIES, "{:.5f}"),
            "inside",
            Bound(0.01, "ours", "a hundredth of a nat"),
        ),
        _of("quality", "difference"),
        headline=True,
    ),
    "divergence-in-fp32": Statement(
        every(
            Quantity("divergence from the fp64 distribution with a cache, over that without", "file", _SERIES),
            "below",
            Bound(1, "arithmetic", "no change"),
        ),
        _of("quality", "kl_ratio", "float32"),
        scope="this processor",
    ),
    "no-worse-prediction": Statement(
        every(
            Quantity(f"log likelihood: {_DIRECTION}", "file", _SERIES),
            "inside",
            Bound(tables.LEAST_EXPLAINED**0.5, "ours", "less than a tenth of the mean square"),
        ),
        _of("shift", "likelihood"),
    ),
    "nothing-in-common": Statement(
        every(
            Quantity("share of the squared change of log-probabilities that all files share", "file", _SERIES, "{:.3f}"),
            "below",
            Bound(tables.LEAST_EXPLAINED, "ours", "a tenth"),
        ),
        _of("shift", "common"),
    ),
    "reference-is-finer": Statement(
        every(
            Quantity("error of the reference's own second path, over the smallest error measured", form="{:.0e}"),
            "below",
            Bound(1e-6, "ours", "a millionth"),
        ),
        _tried(path_errors.CHECK),
    ),
    "loading-in-fp64-is-not": Statement(
        every(
            Quantity("error of the model loaded in fp64, over the smallest error measured", form="{:.2f}"),
            "above",
            Bound(0.1, "ours", "a tenth"),
        ),
        _tried(path_errors.AS_LOADED),
        scope="this model",
    ),
}  # fmt: skip


def _one(measure: Callable[[Results], list[Measured]], form: str) -> Callable[[Results], str]:
    """Write the estimate of the book's one model."""
    return lambda found: measure(found)[0].estimate.text(form)


def _cached(found: Results, dtype: str) -> pd.Series:
    rows = found.quality
    return rows[(rows["path"] == path_errors.CACHED) & (rows["dtype"] == dtype)].iloc[0]


def _agreeing(found: Results) -> str:
    """Count positions whose most probable token is that of fp64, with a cache and without."""
    row = _cached(found, "bfloat16")
    return f"{row['top1']:,} and {row['top1_full']:,} of {row['rows']:,}"


NUMBERS: dict[str, Callable[[Results], str]] = {
    "model": lambda found: found.errors.about["models"][0]["name"],
    "n_texts": lambda found: str(found.rows["sample"].nunique()),
    "n_files": lambda found: str(found.rows["source"].nunique()),
    "n_tokens": lambda found: str(found.errors.about["settings"]["n_tokens"]),
    "n_scored": lambda found: str(int(found.rows["position"].nunique())),
    "ratio_fp32": _one(_of("series", "ratio", "float32"), "{:.2f}"),
    "ratio_bf16": _one(_of("series", "ratio", "bfloat16"), "{:.2f}"),
    "control_bf16": _one(_of("series", "ratio", "bfloat16", path=path_errors.OFF_BY_ONE), "{:.0f}"),
    "coarser_factor": lambda found: f"{two_digits(_coarser(found)[0].estimate.value):,.0f}",
    "coarser": lambda found: _coarser(found)[0].estimate.in_two_digits().text("{:,.0f}"),
    "apart_bf16": _one(_of("series", "apart", "bfloat16"), "{:.2f}"),
    "difference_bf16": _one(_of("quality", "difference", "bfloat16"), "{:.4f}"),
    "kl_ratio_fp32": _one(_of("quality", "kl_ratio", "float32"), "{:.2f}"),
    "kl_fp32": lambda found: power_of_ten(_cached(found, "float32")["kl"], 0),
    "top1_bf16": _agreeing,
}
