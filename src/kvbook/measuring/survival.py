"""How long two paths stay together, where some were watched for too short a time to part."""

import warnings
from dataclasses import dataclass

import numpy as np
import scipy

from kvbook.measuring.estimates import CONFIDENCE, wilson


@dataclass(frozen=True)
class Survival:
    """A Kaplan-Meier curve.

    Attributes
    ----------
    steps : ndarray, shape (n,)
        Steps at which some pair parted, ascending, from 0 (where all are together).
    share : ndarray, shape (n,)
        Estimated share of pairs that are still together after that step.
    low, high : ndarray, shape (n,)
        Pointwise interval: Greenwood's variance on the log-log scale; where all or none are together, Wilson's, in
        which each pair is a trial.
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
        """First step after which at most half are together; infinite where it was not seen."""
        below = self.steps[self.share <= 0.5]
        return float(below[0]) if len(below) else float("inf")

    def at(self, step: float) -> tuple[float, float, float]:
        """Return share, low and high after a step."""
        place = int(np.searchsorted(self.steps, step, side="right")) - 1
        return float(self.share[place]), float(self.low[place]), float(self.high[place])


def kaplan_meier(steps: np.ndarray, parted: np.ndarray) -> Survival:
    """Estimate how long pairs stay together."""
    steps, parted = np.asarray(steps, float), np.asarray(parted, bool)
    n = len(steps)
    # Greenwood's variance is 0 where none has parted, and undefined where all have.
    together, apart = wilson(1.0, n), wilson(0.0, n)
    if not parted.any():
        # scipy's curve has no point then.
        ends = np.array([0.0, steps.max()])
        return Survival(ends, np.ones(2), np.full(2, together.low), np.ones(2), n, 0)
    curve = scipy.stats.ecdf(scipy.stats.CensoredData.right_censored(steps, ~parted)).sf
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = curve.confidence_interval(CONFIDENCE, method="log-log")
    gone = curve.probabilities == 0
    low = np.where(gone, apart.low, interval.low.probabilities)
    high = np.where(gone, apart.high, interval.high.probabilities)
    columns = ((0.0, curve.quantiles), (1.0, curve.probabilities), (together.low, low), (1.0, high))
    return Survival(*(np.concatenate([[first], rest]) for first, rest in columns), n, int(parted.sum()))
