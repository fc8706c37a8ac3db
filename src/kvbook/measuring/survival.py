"""How long two paths stay together, where some were watched for too short a time to part."""

import warnings
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvbook.measuring.estimates import CONFIDENCE


@dataclass(frozen=True)
class Survival:
    """A Kaplan-Meier curve.

    Attributes
    ----------
    steps : ndarray, shape (n,)
        Steps at which some pair parted, ascending, from 0 (where all are together).
    share : ndarray, shape (n,)
        Estimated share of pairs that are still together behind that step.
    low, high : ndarray, shape (n,)
        Pointwise interval (Greenwood's variance on the log-log scale), NaN where it has none.
    pairs, parted : int
        Pairs watched, and those seen to part.
    """

    steps: np.ndarray
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray
    pairs: int
    parted: int

    def median(self) -> float:
        """First step behind which at most half are together; infinite where it was not seen."""
        below = self.steps[self.share <= 0.5]
        return float(below[0]) if len(below) else float("inf")

    def at(self, step: float) -> tuple[float, float, float]:
        """Give share, low and high behind a step."""
        place = int(np.searchsorted(self.steps, step, side="right")) - 1
        return float(self.share[place]), float(self.low[place]), float(self.high[place])


def kaplan_meier(steps: np.ndarray, parted: np.ndarray) -> Survival:
    """Estimate how long pairs stay together."""
    steps, parted = np.asarray(steps, float), np.asarray(parted, bool)
    if not parted.any():
        # scipy's curve has no point then.  What no event in n leaves open is what Clopper and Pearson's bound says.
        low = (1 - CONFIDENCE) ** (1 / len(steps))
        ends = np.array([0.0, steps.max()])
        return Survival(ends, np.ones(2), np.array([1.0, low]), np.ones(2), len(steps), 0)
    curve = stats.ecdf(stats.CensoredData.right_censored(steps, ~parted)).sf
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        # Where none is left the interval is undefined, and comes back as NaN: we know, and draw it so.
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = curve.confidence_interval(CONFIDENCE, method="log-log")
    begin = np.ones(1)
    return Survival(
        steps=np.concatenate([[0.0], curve.quantiles]),
        share=np.concatenate([begin, curve.probabilities]),
        low=np.concatenate([begin, interval.low.probabilities]),
        high=np.concatenate([begin, interval.high.probabilities]),
        pairs=len(steps),
        parted=int(parted.sum()),
    )
