"""Estimates with intervals: growth per layer, ratios between dtypes, shares.

Two kinds of uncertainty are kept apart.  The interval of a fit says how well one law describes the layers' means (it is
all that can be had of a published column).  The bootstrap says how much the means themselves would change with other
samples; it resamples files, since samples of one file resemble each other.  Draws of few files scatter less than new
ones would: the expanded percentile interval of T. Hesterberg (The American Statistician 69, 2015) allows for that.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd

# Its parts come with their first use; `stats` takes a second to import, `special` a tenth of one.
import scipy

CONFIDENCE = 0.95
# Texts, files, prompts or repetitions.  Fewer have no interval; their lowest and highest value are given instead.
FEWEST_UNITS = 4
_DRAWS = 2000
Kind = Literal["95 %", "range"]


def two_digits(value: float) -> float:
    """Round to two significant digits."""
    return float(f"{value:.2g}")


def written(value: float, form: str) -> str:
    """Write a number in a format; where "g" makes 2.5e+02 of it, it reads 250."""
    text = form.format(value)
    return f"{float(text):,.0f}" if "g}" in form and "e+" in text and abs(value) < 1e6 else text


@dataclass(frozen=True)
class Estimate:
    """A number with what is known of its scatter.

    Attributes
    ----------
    value, low, high : float
        The estimate and the ends of its interval or range.
    kind : {"95 %", "range"}
        Whether the ends are those of a 95 % interval, or the lowest and highest of a few values.
    units : int or None
        How many independent units it is from, where whoever made it has counted them.
    """

    value: float
    low: float
    high: float
    kind: Kind = "95 %"
    units: int | None = field(default=None, compare=False)

    def in_two_digits(self) -> "Estimate":
        """Round it and its ends to two significant digits: two processors seldom share more."""
        return Estimate(*map(two_digits, (self.value, self.low, self.high)), self.kind)

    def text(self, form: str = "{:.2f}") -> str:
        """Write it as ``value [low, high]``, or with a range as ``value [low to high]``."""
        between = ", " if self.kind == "95 %" else " to "
        return f"{written(self.value, form)} [{written(self.low, form)}{between}{written(self.high, form)}]"

    def over(self, divisor: float) -> "Estimate":
        """Divide it and its ends by a positive number."""
        return Estimate(self.value / divisor, self.low / divisor, self.high / divisor, self.kind, self.units)


def slopes(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the slope of least squares of each row on `x`.

    Parameters
    ----------
    x : ndarray, shape (n,)
        Such as numbers of layers.
    rows : ndarray, shape (..., n)
        What is fitted.
    """
    centred = x - x.mean()
    return rows @ centred / (centred @ centred)


def students(centre: float, scatter: float, n_free: int, root: float = 1.0, change: Callable = float) -> Estimate:
    """Return a function of a number, with Student's interval of a scatter, over a root, by its degrees of freedom."""
    half = scipy.special.stdtrit(n_free, (1 + CONFIDENCE) / 2) * scatter / root
    return Estimate(*(float(change(centre + shift)) for shift in (0.0, -half, half)))


def growth_per_layer(layers: np.ndarray, drift: np.ndarray) -> Estimate:
    """Fit drift = a * (1 + g) ** layer and give g, with the interval of the fit.

    Parameters
    ----------
    layers : ndarray, shape (n,)
        Layer numbers, three or more.
    drift : ndarray, shape (n,)
        Positive.

    Returns
    -------
    Estimate
        Growth per layer, as a fraction.  The interval takes the residuals as independent, which neighbouring layers are
        not, so it is rather too narrow.
    """
    fit = scipy.stats.linregress(layers, np.log(drift))
    return students(fit.slope, fit.stderr, len(layers) - 2, change=np.expm1)


def geometric_mean_ratio(numerator: np.ndarray, denominator: np.ndarray) -> Estimate:
    """Return the geometric mean of elementwise ratios, with Student's interval on the logarithms.

    Parameters
    ----------
    numerator, denominator : ndarray, shape (n,)
        Positive; one pair a layer.
    """
    return mean_of(np.log(numerator) - np.log(denominator), np.exp)


def mean_of(values: np.ndarray, change: Callable = float) -> Estimate:
    """Return the mean of independent values with Student's interval, or a function of it.

    Parameters
    ----------
    values : ndarray, shape (n,)
        Two or more.
    change : callable, optional
        A function of the mean, to be given instead.
    """
    return students(values.mean(), values.std(ddof=1), len(values) - 1, np.sqrt(len(values)), change)


def wilson(p: float, n: int) -> Estimate:
    """Return Wilson's two-sided interval of a share `p` of `n` trials.

    The book takes it for every share that is none or all, for resampling gives such a share no width.
    """
    z = scipy.special.ndtri((1 + CONFIDENCE) / 2)
    centre, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
    low, high = ((centre + side * half) / (1 + z**2 / n) for side in (-1, 1))
    # Rounding may leave an end a hair beyond what it stands for.
    return Estimate(p, float(np.clip(low, 0, p)), float(np.clip(high, p, 1)), units=n)


def share_over(rows: pd.DataFrame, holds: pd.Series, unit: str = "source") -> tuple[Estimate, int]:
    """Return the share of texts for which something holds, with an interval that counts independent units.

    Parameters
    ----------
    rows : DataFrame
        Has the column `unit`, and may have ``sample``, the text.
    holds : Series of bool
        As long as `rows`.
    unit : str
        What is independent, such as the file that texts are from.

    Returns
    -------
    Estimate
        Where each text is one row, a trial: Wilson's interval for as many trials as there are units.  Where texts have
        several rows: as `share_of_rows`.  Of few units the range of their shares.
    int
        How many units.

    Raises
    ------
    ValueError
        When an outcome is neither 0 nor 1: a share of each text's rows is a case for `share_of_rows`.
    """
    if not holds.isin([0, 1]).all():
        raise ValueError("each trial must hold or not: take share_of_rows for the share of a text's rows")
    of_texts = rows[[unit, "sample"]] if "sample" in rows else rows[[unit]]
    n = rows[unit].nunique()
    if n < FEWEST_UNITS or of_texts.duplicated().any():
        return share_of_rows(rows, holds, unit)
    return wilson(float(holds.mean()), n), n


def share_of_rows(rows: pd.DataFrame, holds: pd.Series, unit: str = "source") -> tuple[Estimate, int]:
    """Return the share of all rows for which something holds, where texts have many rows each, such as tokens or calls.

    A row may itself be a share of what it stands for.  The interval is a bootstrap over units; of none or all it is
    `wilson`, each unit a trial.  Parameters and what is returned as for `share_over`.
    """
    of_units = holds.astype(float).groupby(rows[unit]).agg(["sum", "size"]).to_numpy()
    n, whole = len(of_units), float(of_units[:, 0].sum() / of_units[:, 1].sum())
    if n >= FEWEST_UNITS and whole in (0.0, 1.0):
        return wilson(whole, n), n
    drawn = _weights(n) @ of_units
    return percentiles(whole, drawn[:, 0] / drawn[:, 1], n), n


def median_of(values: np.ndarray) -> Estimate:
    """Return the median of repeats with its bootstrap interval, or of few repeats with their lowest and highest."""
    weights = _weights(len(values))
    drawn = np.repeat(np.tile(values, len(weights)), weights.ravel()).reshape(len(weights), -1)
    return percentiles(float(np.median(values)), np.median(drawn, axis=1), len(values))


@dataclass(frozen=True)
class Resampled:
    """Bootstrap draws of layers' mean drift.

    Attributes
    ----------
    layers : ndarray, shape (n_layers,)
        Layer numbers.
    mean : ndarray, shape (n_layers,)
        Mean over the samples.
    draws : ndarray, shape (n_draws, n_layers)
        The same mean over resampled files; where these are too few to be resampled, the mean of each of them.
    n_files : int
        How many files there are.
    """

    layers: np.ndarray
    mean: np.ndarray
    draws: np.ndarray
    n_files: int

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the interval of each layer's mean, or the lowest and highest of few files."""
        return tuple(np.quantile(self.draws, _ends(self.n_files), axis=0))


def resample(rows: pd.DataFrame, value: str, by: str = "layer") -> Resampled:
    """Bootstrap means over samples by resampling files; equal files give equal draws, so ratios are taken by draw.

    Parameters
    ----------
    rows : DataFrame
        Columns ``sample``, ``source``, `by` and `value`; one row a sample and a value of `by`.
    value : str
        What to average.
    by : str
        What to keep apart, such as the layer.
    """
    return _resampled(by_sample(rows, value, by))


def by_sample(rows: pd.DataFrame, value: str, by: str) -> pd.DataFrame:
    """Make a row of each file's sample and a column of each value of `by`, means where there are several rows."""
    # As pandas' own pivot table, in a third of its time; of thousands of small tables it takes most.
    return rows.groupby(["source", "sample", by])[value].mean().dropna().unstack()


def _resampled(table: pd.DataFrame) -> Resampled:
    """Bootstrap the columns' means; a row of the table is a sample, its index ``source`` and ``sample``."""
    files = table.groupby("source")
    sums, counts = files.sum().to_numpy(), files.size().to_numpy()
    weights = _weights(len(counts))
    return Resampled(
        layers=table.columns.to_numpy(), mean=table.to_numpy().mean(0),
        draws=(weights @ sums) / (weights @ counts)[:, None], n_files=len(counts),
    )


@functools.lru_cache
def _weights(n_files: int) -> np.ndarray:
    """Draw how often each file is in each draw, shape (n_draws, n_files); of few files each draw is one of them."""
    if n_files < FEWEST_UNITS:
        return np.eye(n_files, dtype=int)
    drawn = np.random.default_rng(0).multinomial(n_files, np.full(n_files, 1 / n_files), size=_DRAWS)
    # It is shared by whoever asks for as many files.
    drawn.flags.writeable = False
    return drawn


@functools.lru_cache
def _ends(n_units: int) -> tuple[float, float]:
    """Return the quantiles of draws that are an estimate's ends: further out, the fewer units there are."""
    if n_units < FEWEST_UNITS:
        return 0.0, 1.0
    t = scipy.special.stdtrit(n_units - 1, (1 + CONFIDENCE) / 2)
    tail = scipy.special.ndtr(-t * math.sqrt(n_units / (n_units - 1)))
    return tail, 1 - tail


def percentiles(value: float, draws: np.ndarray, n_units: int) -> Estimate:
    """Return a number with the interval that its bootstrap draws give, or with the range of few values.

    Parameters
    ----------
    value : float
        The estimate.
    draws : ndarray, shape (n_draws,)
        The same of resampled data, or of each of a few units.
    n_units : int
        How many units were resampled.
    """
    low, high = (float(end) for end in np.quantile(draws, _ends(n_units)))
    if n_units >= FEWEST_UNITS:
        return Estimate(float(value), low, high, units=n_units)
    # What is fitted to all units together need not lie among what is fitted to each.
    return Estimate(float(value), min(low, float(value)), max(high, float(value)), "range", n_units)


def growth_resampled(resampled: Resampled) -> Estimate:
    """Return the growth per layer with its bootstrap interval; the mean of each layer must be above 0 in each draw."""
    return percentiles(
        np.expm1(slopes(resampled.layers, np.log(resampled.mean))),
        np.expm1(slopes(resampled.layers, np.log(resampled.draws))), resampled.n_files,
    )


def ratio_resampled(numerator: Resampled, denominator: Resampled) -> Estimate:
    """Return the geometric mean ratio over layers with its bootstrap interval, the draws paired."""
    return percentiles(
        np.exp((np.log(numerator.mean) - np.log(denominator.mean)).mean()),
        np.exp((np.log(numerator.draws) - np.log(denominator.draws)).mean(1)), numerator.n_files,
    )


def paired_ratio(rows: pd.DataFrame, value: str, variant: str, against: str) -> Estimate:
    """Return the ratio of two variants' means of the same samples, with its bootstrap interval over files.

    Parameters
    ----------
    rows : DataFrame
        Columns ``sample``, ``source``, ``variant`` and `value`.
    value : str
        What to average.
    variant, against : str
        Values of the column ``variant``.
    """
    both = resample(rows[rows["variant"].isin([variant, against])], value, by="variant")
    top, bottom = map(list(both.layers).index, (variant, against))
    return percentiles(both.mean[top] / both.mean[bottom], both.draws[:, top] / both.draws[:, bottom], both.n_files)


def paired_median_ratio(rows: pd.DataFrame, value: str, variant: str, against: str) -> Estimate:
    """Return the median over samples of the ratio of two variants, for times, whose means a single hiccup can move.

    Parameters and the unit of resampling as for `paired_ratio`.
    """
    table = by_sample(rows, value, "variant")
    # A list: to take one item out of a series takes as long as the median of them all.
    ratios = list((table[variant] / table[against]).groupby("source").apply(np.asarray))
    return of_units(np.median, ratios, _DRAWS // 4)


def of_units(statistic: Callable[[np.ndarray], float], units: Sequence[np.ndarray], n_draws: int) -> Estimate:
    """Return a statistic of all rows with its bootstrap interval over units, or of few units with its range over them.

    Parameters
    ----------
    statistic : callable
        Takes rows, those of one unit or of several.
    units : sequence of ndarray
        The rows of each unit.
    n_draws : int
        How many draws; few where rows have to be sorted anew in each.
    """
    whole, n = statistic(np.concatenate(units)), len(units)
    # Of few units each draw is one of them.
    picks = np.random.default_rng(0).integers(0, n, (n_draws, n)) if n >= FEWEST_UNITS else np.arange(n)[:, None]
    return percentiles(whole, np.array([statistic(np.concatenate([units[i] for i in pick])) for pick in picks]), n)


def mean_resampled(rows: pd.DataFrame, value: str, change: Callable = np.asarray) -> Estimate:
    """Return the mean over samples with its bootstrap interval over files.

    Parameters
    ----------
    rows : DataFrame
        Columns ``sample``, ``source`` and `value`; several rows of one sample are averaged first.
    value : str
        What to average.
    change : callable, optional
        A function of the mean, to be given instead.
    """
    # As `resample` with a single column, without a pivot table, which would take most of the time.
    only = _resampled(rows.groupby(["source", "sample"])[[value]].mean().dropna())
    return percentiles(change(only.mean[0]), change(only.draws[:, 0]), only.n_files)


def log_mean_resampled(rows: pd.DataFrame, value: str) -> Estimate:
    """Return the geometric mean over samples, as `mean_resampled` gives the arithmetic one; `value` is positive."""
    of_logs = mean_resampled(rows.assign(logarithm=np.log(rows[value].to_numpy())), "logarithm")
    return Estimate(*np.exp([of_logs.value, of_logs.low, of_logs.high]).tolist(), of_logs.kind, of_logs.units)


def flat(table: pd.DataFrame) -> pd.DataFrame:
    """Spread each column of estimates over four, value, low, high and kind, for a CSV; what is None stays empty."""
    parts = {}
    for name, column in table.items():
        if column.map(lambda x: isinstance(x, Estimate)).any():
            parts[name] = column.map(lambda e: getattr(e, "value", None))
            for end in ("low", "high", "kind"):
                parts[f"{name}_{end}"] = column.map(lambda e, end=end: getattr(e, end, None))
        else:
            parts[name] = column
    return pd.concat(parts, axis=1)
