"""The claims of issue 25420 on which path is right, each with the check that its YAML describes."""

import pandas as pd

from kvbook.measuring import estimates as fits
from kvreport.chapters.which_path_is_right import path_errors
from kvreport.chapters.which_path_is_right.results import Results
from kvreport.publishing.verdicts import Verdict, holds, weights_of

# A shift that explains less of the mean square than this is one that the scatter drowns.
LEAST_EXPLAINED = 0.1
# A loss of precision that is smaller than this is none that a reader would call one.
LEAST_LOSS = 1.1


def _cached(table: pd.DataFrame, *dtypes: str) -> pd.DataFrame:
    return table[(table["path"] == path_errors.CACHED) & table["dtype"].isin(dtypes)]


def _largest(estimate: fits.Estimate) -> float:
    return max(abs(estimate.low), abs(estimate.high))


def distribution_shift(results: Results) -> Verdict:
    """Look for a direction in what the cache changes."""
    table = _cached(results.shift, "float16", "bfloat16")
    if table.empty:
        return Verdict("0 rows in 16 bits", "not run")
    if table["common"].isna().any():
        return Verdict(f"fewer than {fits.FEWEST_UNITS} files, or no drift in one of them", "not run")
    ends = {name: max(_largest(estimate) for estimate in table[name]) for name in ("likelihood", "entropy", "common")}
    bound = LEAST_EXPLAINED**0.5
    here = (
        f"farthest end of an interval in {len(table)} pairs of model and dtype: likelihood {ends['likelihood']:.2f} and entropy "
        f"{ends['entropy']:.2f} of the root mean square (a tenth of its square is {bound:.2f}), in common {ends['common']:.3f}; "
        f"likelihood lower by the whole interval in {sum(r.likelihood.high < 0 for r in table.itertuples())}"
    )
    worse = all(r.likelihood.high < 0 for r in table.itertuples())
    scatters = max(ends["likelihood"], ends["entropy"]) < bound and ends["common"] < LEAST_EXPLAINED
    return Verdict(here, holds(worse, scatters, weights_of(results.errors.about["models"])))


def caching_loses_precision(results: Results) -> Verdict:
    """Compare the two errors against fp64."""
    table = _cached(results.series, "bfloat16")
    if table.empty:
        return Verdict("0 rows in bf16", "not run")
    errors = "; ".join(f"{r.model} {r.ratio.text('{:.2f}')}" for r in table.itertuples())
    here = f"error over the uncached one's: {errors}; a loss below {LEAST_LOSS - 1:.0%} counts as none"
    lost, kept = (table["ratio"].map(test).all() for test in (lambda e: e.low > 1, lambda e: e.high < LEAST_LOSS))
    return Verdict(here, holds(bool(lost), bool(kept), weights_of(results.errors.about["models"])))


CHECKS = {"distribution-shift": distribution_shift, "caching-loses-precision": caching_loses_precision}
