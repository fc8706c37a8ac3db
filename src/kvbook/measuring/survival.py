"""How long two paths stay together, where some were watched for too short a time to part."""

import warnings

import numpy as np
import scipy

from kvbook.measuring.estimates import CONFIDENCE, Estimate, wilson


def still_together(steps: np.ndarray, parted: np.ndarray, step: float) -> Estimate:
    """Estimate which share of pairs is still together after a step: a point of the curve of Kaplan and Meier.

    The interval is pointwise: Greenwood's variance on the log-log scale; where all or none are together, Wilson's, in
    which each pair is a trial.  Of each pair it is said for how many steps it was watched, and whether it then parted.
    """
    steps, parted = np.asarray(steps, float), np.asarray(parted, bool)
    # Greenwood's variance is 0 where none has parted, and undefined where all have.
    if not parted[steps <= step].any():
        return wilson(1.0, len(steps))
    curve = scipy.stats.ecdf(scipy.stats.CensoredData.right_censored(steps, ~parted)).sf
    if not (share := float(curve.evaluate(step))):
        return wilson(0.0, len(steps))
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = curve.confidence_interval(CONFIDENCE, method="log-log")
    return Estimate(share, float(interval.low.evaluate(step)), float(interval.high.evaluate(step)))
