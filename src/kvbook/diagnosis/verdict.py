"""Bug or rounding: the verdict on drift that was measured at several unit roundoffs.

Rounding is proportional to the unit roundoff u of the arithmetic; what a bug does to the numbers is not.  So the logarithm
of drift against the logarithm of u has slope 1 for the one and slope 0 for the other.  Two rules follow, in this order.

Size
    A drift of more than `LIMIT` roundoffs is no rounding: in fp64 that is half way, on the logarithmic axis, to the
    roundoff of fp32, and a model whose roundings grew so much would give nothing but noise in 16 bits.  One text is enough,
    so that a bug which strikes only some texts is found.  In 16 bits the rule cannot speak: there it allows everything.
Slope
    Fitted by least squares through the dtypes' mean drift.  Below 1/2 with its whole interval it is nearer to a bug's, above
    1/2 with its whole interval nearer to rounding's; if the interval holds 1/2 nothing is decided.

The interval takes in two uncertainties.  That over texts is bootstrapped over their files.  That over dtypes, for the
constant in front of u differs between them (16-bit products are summed in 32 bits), is the fit's own standard error, but
never less than `SCATTER` allows, since with two to four dtypes the residuals say little.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats

from kvbook.measuring import estimates as fits
from kvbook.measuring.agreement import UNIT_ROUNDOFF

Kind = Literal["exact", "rounding", "bug", "undecided"]

# Roundoffs: 2 ** ((53 - 24) / 2), half the exponents between fp64 and fp32.
LIMIT = 2.0**14.5
# Standard deviation, in powers of two, of the constants in front of u between dtypes.
SCATTER = 1.0
BOUNDARY = 0.5
_DRAWS = 500


@dataclass(frozen=True)
class Finding:
    """What drift at several roundoffs amounts to.

    Attributes
    ----------
    kind : {"exact", "rounding", "bug", "undecided"}
        The verdict.
    why : str
        The rule that decided, with its numbers, as half a sentence.
    slope : Estimate or None
        Of log drift on log u, with its 95 % interval; None with fewer than two dtypes that differ at all.
    drift : dict of str to float
        Mean over texts by dtype, from the finest; infinite where only the cached pass overflowed.
    roundoffs : dict of str to float
        Largest over texts, in roundoffs of the dtype.
    left_out : dict of str to str
        Dtypes of no use, and why.
    """

    kind: Kind
    why: str
    slope: fits.Estimate | None
    drift: dict[str, float]
    roundoffs: dict[str, float]
    left_out: dict[str, str] = field(default_factory=dict)


def written(slope: fits.Estimate) -> str:
    """Write a slope with its interval; what rounds to zero has no sign."""
    value, low, high = (round(number, 2) + 0.0 for number in (slope.value, slope.low, slope.high))
    return fits.Estimate(value, low, high).text()


def slope(rows: pd.DataFrame, seed: int = 0) -> fits.Estimate | None:
    """Fit the slope of log drift on log unit roundoff.

    Parameters
    ----------
    rows : DataFrame
        ``dtype``, ``source``, ``sample`` and ``drift``, which is finite.
    seed : int
        Of the bootstrap.

    Returns
    -------
    Estimate or None
        None where fewer than two dtypes differ at all: a drift of zero has no logarithm.
    """
    means = rows.groupby("dtype")["drift"].mean()
    used = [dtype for dtype in UNIT_ROUNDOFF if means.get(dtype, 0.0) > 0]
    if len(used) < 2:
        return None
    x = np.log2([UNIT_ROUNDOFF[dtype] for dtype in used])
    spread = np.sqrt(np.square(x - x.mean()).sum())
    fit = stats.linregress(x, np.log2(means[used].to_numpy()))
    # With two points the line goes through both, and the fit knows no error.
    of_fit = fit.stderr if len(used) > 2 else 0.0
    error = np.hypot(max(of_fit, SCATTER / spread), _resampled(rows, used, x, seed))
    half = stats.norm.ppf((1 + fits.CONFIDENCE) / 2) * error
    return fits.Estimate(float(fit.slope), float(fit.slope - half), float(fit.slope + half))


def _resampled(rows: pd.DataFrame, used: list[str], x: np.ndarray, seed: int) -> float:
    """Bootstrap the slope's standard error over files."""
    table = rows.pivot_table(index=["source", "sample"], columns="dtype", values="drift")[used].groupby("source").sum()
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(table), np.full(len(table), 1 / len(table)), size=_DRAWS)
    sums = weights @ table.to_numpy()
    # A draw of texts that all agree to the bit in some dtype has no slope there.
    logs = np.log2(sums[(sums > 0).all(1)])
    if len(logs) < 2:
        return 0.0
    centred = x - x.mean()
    return float(np.std(logs @ centred / (centred @ centred), ddof=1))


def judge(rows: pd.DataFrame, seed: int = 0) -> Finding:
    """Give the verdict on one symptom.

    Parameters
    ----------
    rows : DataFrame
        One row a (dtype, text): ``dtype``, ``source`` (the unit of resampling), ``sample``, and ``drift``, the difference
        of two computations over the scale of what is compared.  A drift is NaN where the reference is not finite, and
        infinite where it is and the other computation is not.
    seed : int
        Of the bootstrap.
    """
    left_out = {}
    for dtype, part in rows.groupby("dtype"):
        if part["drift"].isna().any():
            left_out[dtype] = "the full pass overflows"
    rows = rows[~rows["dtype"].isin(left_out)]
    dtypes = [dtype for dtype in UNIT_ROUNDOFF if dtype in set(rows["dtype"])]
    by_dtype = rows.groupby("dtype")["drift"]
    drift = {dtype: float(by_dtype.mean()[dtype]) for dtype in dtypes}
    roundoffs = {dtype: float(by_dtype.max()[dtype]) / UNIT_ROUNDOFF[dtype] for dtype in dtypes}
    finite = rows[np.isfinite(rows["drift"])]
    fitted = slope(finite, seed) if len(finite) == len(rows) else None
    kind, why = _rule(drift, roundoffs, fitted)
    return Finding(kind, why, fitted, drift, roundoffs, left_out)


def _rule(drift: dict[str, float], roundoffs: dict[str, float], fitted: fits.Estimate | None) -> tuple[Kind, str]:
    if not drift:
        return "undecided", "the full pass overflows in every dtype"
    for dtype, multiple in roundoffs.items():
        if np.isinf(multiple):
            return "bug", f"in {dtype} the cached pass overflows and the full pass does not"
        if multiple > LIMIT:
            return "bug", f"{multiple:.2g} roundoffs in {dtype}, more than the {LIMIT:,.0f} that rounding can be"
    if not any(drift.values()):
        return "exact", "every logit is equal in every bit"
    if fitted is None:
        return _of_few(drift)
    text = f"slope {written(fitted)}"
    if fitted.low > BOUNDARY:
        return "rounding", f"{text}: it falls with the roundoff"
    if fitted.high < BOUNDARY:
        return "bug", f"{text}: it does not fall with the roundoff"
    return "undecided", f"{text} holds both: add a finer dtype, float64 first of all"


def _of_few(drift: dict[str, float]) -> tuple[Kind, str]:
    """Judge without a slope, where one dtype alone differs, by not more than the limit."""
    finest, differs = next(iter(drift)), next(dtype for dtype, value in drift.items() if value > 0)
    if finest == "float64":
        return "rounding", f"only {differs} differs, and the drift in float64 is no more than rounding can be"
    if differs != finest:
        return "rounding", f"only {differs} differs: in the finer arithmetic every logit is equal in every bit"
    return "undecided", f"{differs} alone tells no slope: add a finer dtype, float64 first of all"
