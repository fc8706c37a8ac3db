"""Bug or rounding: the verdict on drift that was measured at several unit roundoffs.

Rounding is proportional to the unit roundoff u of the arithmetic; what a bug does to the numbers is not.  So the
logarithm of drift against the logarithm of u has slope 1 for the one and slope 0 for the other.  Three rules follow, in
this order.

Too large
    A drift of more than `LIMIT` roundoffs is no rounding: in fp64 that is half way, on the logarithmic axis, to the
    roundoff of fp32, and a model whose roundings grew so much would give nothing but noise in 16 bits.  One text is
    enough, so that a bug which strikes only some texts is found.  In 16 bits the rule cannot speak: there it allows
    everything.
Small enough
    Where no text drifts in the finest dtype by more than half way to the roundoff of the next coarser one (`ROUNDING`),
    it is rounding.  In fp64 that is the same `LIMIT`, so that fp64 always decides.  In fp32 it is less: a cache kept in
    16 bits drifts by more there.  What coarser dtypes do is no evidence against it: they may drift by much less than a
    roundoff, or not at all, for rounding to few bits makes most numbers equal.
Slope
    Fitted by least squares through the dtypes' mean drift.  A drift below one roundoff is as good as equal and counts
    as one: where fp32 drifts by so much that rounding would show in 16 bits too, and it does not, the slope is flat.
    Below 1/2 with its whole interval it is nearer to a bug's, above 1/2 with its whole interval nearer to rounding's;
    if the interval holds 1/2 nothing is decided.

No rule knows intent: a cache that keeps fewer bits than the model computes with is a bug here.
`kvbook.diagnosis.storage` tells those that are meant to.

The interval takes in two uncertainties.  That over texts is bootstrapped over their files.  That over dtypes, for the
constant in front of u differs between them (16-bit products are summed in 32 bits), is the fit's own standard error,
but never less than `SCATTER` allows, since with two to four dtypes the residuals say little.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import scipy

from kvbook.measuring import UNIT_ROUNDOFF, estimates

Kind = Literal["exact", "rounding", "bug", "undecided"]

# Roundoffs: 2 ** ((53 - 24) / 2), half the exponents between fp64 and fp32.
LIMIT = 2.0**14.5
# Roundoffs in the finest dtype that are rounding whatever the others do: half the exponents to the next coarser dtype.
ROUNDING = {"float64": LIMIT, "float32": 2.0**6.5}
# Standard deviation, in powers of two, of the constants in front of u between dtypes.
SCATTER = 1.0
BOUNDARY = 0.5
# From the best to the worst.
ORDER: tuple[Kind, ...] = ("exact", "rounding", "undecided", "bug")
_DRAWS = 500


class Finding(NamedTuple):
    """What drift at several roundoffs amounts to.

    Attributes
    ----------
    kind : {"exact", "rounding", "bug", "undecided"}
        The verdict.
    why : str
        The rule that decided, with its numbers, as half a sentence.
    slope : Estimate or None
        Of log drift on log u, with its 95 % interval; None with fewer than two dtypes, or where none drifts by a
        roundoff.
    drift : dict of str to float
        Mean over texts by dtype, from the finest; infinite where only the cached pass overflowed.
    roundoffs : dict of str to float
        Largest over texts, in roundoffs of the dtype.
    """

    kind: Kind
    why: str
    slope: estimates.Estimate | None
    drift: dict[str, float]
    roundoffs: dict[str, float]


def count(roundoffs: float) -> str:
    """Write a number of roundoffs with two or three digits."""
    return f"{roundoffs:,.0f}" if 10 <= roundoffs < 1e6 else f"{roundoffs:.2g}"


def slope(rows: pd.DataFrame, seed: int = 0) -> estimates.Estimate | None:
    """Fit the slope of log drift on log unit roundoff."""
    table = estimates.by_sample(rows, "drift", "dtype")
    means = table.mean()
    present = [dtype for dtype in UNIT_ROUNDOFF if dtype in means]
    equal = [dtype for dtype in present if means[dtype] < UNIT_ROUNDOFF[dtype]]
    used = [dtype for dtype in present if dtype not in equal[1:]]
    if len(used) < 2 or len(equal) == len(present):
        return None
    roundoffs = np.array([UNIT_ROUNDOFF[dtype] for dtype in used])
    x = np.log2(roundoffs)
    spread = np.sqrt(np.square(x - x.mean()).sum())
    y = np.log2(np.maximum(means[used].to_numpy(), roundoffs))
    # With two points the line goes through both, and the fit knows no error.
    (found, _), scatter = np.polyfit(x, y, 1, cov=True) if len(used) > 2 else (np.polyfit(x, y, 1), np.zeros((2, 2)))
    error = np.hypot(max(np.sqrt(scatter[0, 0]), SCATTER / spread), _resampled(table[used], roundoffs, seed))
    half = scipy.special.ndtri((1 + estimates.CONFIDENCE) / 2) * error
    return estimates.Estimate(float(found), float(found - half), float(found + half))


def _resampled(table: pd.DataFrame, roundoffs: np.ndarray, seed: int) -> float:
    """Bootstrap the slope's standard error over files."""
    files = table.groupby("source")
    totals, counts = files.sum().to_numpy(), files.size().to_numpy()
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(totals), np.full(len(totals), 1 / len(totals)), size=_DRAWS)
    means = weights @ totals / (weights @ counts)[:, None]
    return float(np.std(estimates.slopes(np.log2(roundoffs), np.log2(np.maximum(means, roundoffs))), ddof=1))


def kind_of(drifts: Mapping[str, Sequence[float]]) -> Kind:
    """Judge drifts by dtype, one for each text, by kind alone; the slope is fitted only where nothing else decides."""
    kept = {dtype: drifts[dtype] for dtype in UNIT_ROUNDOFF if dtype in drifts and not np.isnan(drifts[dtype]).any()}
    means = {dtype: float(np.mean(values)) for dtype, values in kept.items()}
    roundoffs = {dtype: max(values) / UNIT_ROUNDOFF[dtype] for dtype, values in kept.items()}
    kind, _ = _rule(means, roundoffs, None)
    return judge(_table(kept)).kind if kind == "undecided" and kept else kind


def of_one(drift: float, dtype: str) -> Finding:
    """Judge a single drift."""
    return judge(_table({dtype: [drift]}))


def _table(drifts: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    given = [(dtype, str(text), text, drift) for dtype in drifts for text, drift in enumerate(drifts[dtype])]
    return pd.DataFrame(given, columns=["dtype", "source", "sample", "drift"])


def judge(rows: pd.DataFrame, seed: int = 0) -> Finding:
    """Judge one symptom."""
    # Where the full pass overflows there is nothing to compare with.
    rows = rows[~rows["dtype"].isin(rows.loc[rows["drift"].isna(), "dtype"])]
    dtypes = [dtype for dtype in UNIT_ROUNDOFF if dtype in set(rows["dtype"])]
    of_dtype = rows.groupby("dtype")["drift"].agg(["mean", "max"])
    drift = {dtype: float(of_dtype["mean"][dtype]) for dtype in dtypes}
    roundoffs = {dtype: float(of_dtype["max"][dtype]) / UNIT_ROUNDOFF[dtype] for dtype in dtypes}
    fitted = slope(rows, seed) if np.isfinite(rows["drift"]).all() else None
    kind, why = _rule(drift, roundoffs, fitted)
    return Finding(kind, why, fitted, drift, roundoffs)


def _rule(drift: dict[str, float], roundoffs: dict[str, float], fitted: estimates.Estimate | None) -> tuple[Kind, str]:
    if not drift:
        return "undecided", "in every dtype the full pass overflows, or its logits are all equal"
    for dtype, multiple in roundoffs.items():
        if np.isinf(multiple):
            return "bug", f"in {dtype} the cached pass overflows and the full pass does not"
        if multiple > LIMIT:
            return "bug", f"{count(multiple)} roundoffs in {dtype}, more than the {LIMIT:,.0f} that rounding can be"
    if not any(drift.values()):
        return "exact", "every logit is equal in every bit"
    finest = next(iter(drift))
    if drift[finest] == 0:
        differs = next(dtype for dtype, value in drift.items() if value > 0)
        return "rounding", f"{differs} differs, but in {finest} every logit is equal in every bit"
    if roundoffs[finest] <= (most := ROUNDING.get(finest, 0.0)):
        within = f"no more than the {most:,.0f} that rounding can be"
        return "rounding", f"{count(roundoffs[finest])} roundoffs in {finest}, {within}"
    if fitted is None:
        where = f"{finest} alone tells" if len(drift) == 1 else "drifts below one roundoff tell"
        return "undecided", f"{where} no slope: add a finer dtype, float64 first of all"
    # What rounds to zero has no sign.
    rounded = (round(number, 2) + 0.0 for number in (fitted.value, fitted.low, fitted.high))
    text = f"slope {estimates.Estimate(*rounded).text()}"
    if fitted.low > BOUNDARY:
        return "rounding", f"{text}: it falls with the roundoff"
    if fitted.high < BOUNDARY:
        return "bug", f"{text}: it does not fall with the roundoff"
    return "undecided", f"{text} holds both: add a finer dtype, float64 first of all"
