"""How far the trainer's log-probabilities are from the rollout's, on tokens that the rollout sampled.

Everything starts from the log-ratio of each token, log p(trainer) − log p(rollout): its exponential is the importance
ratio, which is 1 where training is on-policy.  A function of `TERMS` turns log-ratios into one number each, and the
measure is their mean, so a chapter that needs an interval can resample the same terms by sequence.  The log-ratio of a
sequence is the sum of its tokens' (`of_sequences`), and the same functions take it.

The estimates of KL(rollout ‖ trainer) are called k1, k2 and k3, as in reinforcement learning.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

# Distances from 1 that an importance ratio is held against: ours, and the clip of PPO.
NARROW, PPO_CLIP = 0.1, 0.2


def exp_absolute(log_ratio: npt.ArrayLike) -> np.ndarray:
    """Return ``exp|Δ log p|``: the factor between the two probabilities, whichever is larger."""
    return np.exp(np.abs(log_ratio))


def k2(log_ratio: npt.ArrayLike) -> np.ndarray:
    """Return k2 = ``(log r)² / 2``: never negative, with a small bias."""
    return np.square(log_ratio) / 2


def k3(log_ratio: npt.ArrayLike) -> np.ndarray:
    """Return k3 = ``r − 1 − log r``: never negative, and without bias."""
    return np.expm1(log_ratio) - log_ratio


def outside(log_ratio: npt.ArrayLike, width: float) -> np.ndarray:
    """Tell where the importance ratio is further than `width` from 1."""
    return np.abs(np.expm1(log_ratio)) > width


def chi_squared(log_ratio: npt.ArrayLike) -> np.ndarray:
    """Return ``r² − 1``, whose mean is χ²(trainer ‖ rollout)."""
    # Long sequences with a fault overflow: infinite is then the right answer.
    with np.errstate(over="ignore"):
        return np.expm1(2 * np.asarray(log_ratio))


# k1 is ``-log r``: without bias, and of either sign.
TERMS: dict[str, Callable[[npt.ArrayLike], np.ndarray]] = {
    "mean_abs": np.abs, "mean_exp_abs": exp_absolute, "k1": np.negative, "k2": k2, "k3": k3,
    "outside_narrow": lambda log_ratio: outside(log_ratio, NARROW),
    "outside_ppo_clip": lambda log_ratio: outside(log_ratio, PPO_CLIP),
    "chi_squared": chi_squared,
}


def effective_share(log_ratio: npt.ArrayLike) -> float:
    """Return the effective sample size, ``(Σr)² / Σr²``, as a share of the samples: 1 where all weigh the same.

    Weights that are truncated have the log-ratio ``np.minimum(log_ratio, np.log(cap))``.
    """
    # The largest weight becomes 1, so nothing overflows; a common factor cancels.
    weights = np.exp(np.asarray(log_ratio) - np.max(log_ratio))
    return float(weights.sum() ** 2 / np.square(weights).sum() / weights.size)


def of_sequences(log_ratio: npt.ArrayLike, sequence: npt.ArrayLike) -> np.ndarray:
    """Sum the tokens' log-ratios by sequence, in the order in which `sequence`, a label of each token, sorts them.

    For ratios by length give the first tokens of each sequence alone.
    """
    _, index = np.unique(np.asarray(sequence), return_inverse=True)
    return np.bincount(index, weights=np.asarray(log_ratio, dtype=np.float64))


def summary(log_ratio: npt.ArrayLike, sequence: npt.ArrayLike) -> dict[str, float]:
    """Return every measure by name: those of tokens, then those of sequences, whose names begin with ``sequence_``."""
    of_tokens, sums = np.asarray(log_ratio, dtype=np.float64), of_sequences(log_ratio, sequence)
    with np.errstate(over="ignore"):
        low, middle, high = np.exp(np.quantile(sums, [0.0, 0.5, 1.0]))
    return {name: float(np.mean(term(of_tokens))) for name, term in TERMS.items()} | {
        "largest": float(np.max(np.abs(of_tokens))), "effective_share": effective_share(of_tokens),
        "sequence_ratio_lowest": float(low), "sequence_ratio_median": float(middle),
        "sequence_ratio_highest": float(high), "sequence_chi_squared": float(np.mean(chi_squared(sums))),
        "sequence_effective_share": effective_share(sums),
    }
