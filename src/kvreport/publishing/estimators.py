"""Estimators: what becomes of the rows of a group, for the measures of a chapter."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvbook.measuring import estimates
from kvbook.measuring.estimates import Estimate

# The column that tells the independent units of a measure apart.
UNITS = {
    "file": "source", "model": "model", "prompt": "prompt", "repeat": "repeat", "repetition": "repetition",
    "text": "sample", "compilation": "way",
}


def _of_known(column: str, estimate: Callable[[pd.DataFrame], Estimate]):
    """Estimate from the rows that have a value in a column; None where none has."""

    def of_known(rows: pd.DataFrame) -> Estimate | None:
        known = rows[rows[column].notna()]
        return estimate(known) if len(known) else None

    return of_known


def share(column: str, unit: str = "file"):
    """Share of units for which a column holds."""
    return _of_known(column, lambda rows: estimates.share_over(rows, rows[column] > 0, UNITS[unit])[0])


def mean(column: str, change: Callable[[Any], Any] = lambda of: of):
    """Mean over samples, or a function of it, with files resampled."""
    return _of_known(column, lambda rows: estimates.mean_resampled(rows, column, change))


def geometric_mean(column: str):
    """Geometric mean over samples, or of the ratio of two groups at each; of the values that have a logarithm."""
    fitted = _of_known(column, lambda rows: estimates.log_mean_resampled(rows, column))

    def estimate(rows: pd.DataFrame, other: pd.DataFrame | None = None) -> Estimate | None:
        if other is not None:
            both = rows.merge(other, on=["source", "sample"], suffixes=("", "_other"))
            rows = both.assign(**{column: both[column] / both[f"{column}_other"]})
        return fitted(rows[rows[column].between(0, math.inf, inclusive="neither")])

    return estimate


def ratio_of_means(column: str):
    """Ratio of two groups' means over the same samples; there is none over a group of zeros."""
    fit = estimates.paired_ratio
    return lambda rows, other: fit(_paired(rows, other), column, "one", "other") if other[column].any() else None


def median_of_ratios(column: str):
    """Median over samples of the ratio of two groups, for times."""
    return lambda rows, other: estimates.paired_median_ratio(_paired(rows, other), column, "one", "other")


def median(column: str):
    """Median over repeats, or of the ratio of two groups at each repeat."""

    def estimate(rows: pd.DataFrame, other: pd.DataFrame | None = None) -> Estimate | None:
        values = rows.set_index("repeat")[column]
        if other is not None:
            values = values / other.set_index("repeat")[column]
        values = values.dropna().to_numpy()
        return estimates.median_of(values) if len(values) else None

    return estimate


def _paired(rows: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([rows.assign(variant="one"), other.assign(variant="other")])


def counted(count: Callable[..., float]):
    """A fact about the rows of a group or of two, with no interval: nothing is sampled."""

    def estimate(*groups: pd.DataFrame) -> Estimate:
        value = float(count(*groups))
        return Estimate(value, value, value, "range")

    return estimate


def computed(column: str, how: str):
    """A fact about a column, by the name that pandas has for it, such as "max"."""
    return counted(lambda rows: rows[column].agg(how))


def total(column: str):
    """Sum of a column."""
    return computed(column, "sum")


def lacking(column: str):
    """How many rows there are for which a column does not hold."""
    return counted(lambda rows: (rows[column] == 0).sum())


@dataclass(frozen=True)
class Part(Estimate):
    """A share that was counted, and of how many."""

    of: int = 0


def part(column: str, of: str = ""):
    """Share of all rows for which a column holds, or of another one's sum, where there are no others."""

    def estimate(rows: pd.DataFrame) -> Estimate:
        whole = int(rows[of].sum()) if of else len(rows)
        value = float(rows[column].sum() / whole)
        return Part(value, value, value, "range", of=whole)

    return estimate


def distinct(column: str):
    """How many values a column has."""
    return computed(column, "nunique")


def first(column: str):
    """A column's value in the first row."""
    return counted(lambda rows: rows[column].iloc[0])
