"""Rounding or fault: the one rule on two tables of log-probabilities, with controls as the yardstick.

A control scores the same tokens with the same weights and the rollout's dtype, in another shape and without reused
state: for example in one full pass of another batch size.  Whatever moves it is rounding.

A gap is ``|Δ log p|`` of a token against the trainer.  Sequences are the independent units, never tokens.  In both
tables a sequence's gap is the mean over its tokens that moved at all: what is equal in every digit ran the same kernel,
and tells nothing of rounding.  In 16 bits, rounding leaves a token alone or moves it by as much as any other rounding
does.  So even a control that moves few tokens gives the scale.

Exact
    No token moves.
Rounding of fp32
    No token moves by more than `FLOOR`; no control is needed.
Too large
    The mean gap is above `PLAIN`; no control is needed either.
Tail
    One token's gap is more than `FAR` times the largest of the controls', which moved half of all tokens or more.
Ratio
    The geometric mean over sequences of rollout's gap over controls' gap, with Student's 95 % interval.  Above `WITHIN`
    with its whole interval it is a fault, below it with its whole interval rounding, else nothing is decided.
One side
    Rounding moves log-probabilities up as often as down.  Here the mean of Δ log p over sequences is further from 0
    than half the controls' gap, with its whole interval, and in the controls it is not.
Few
    Where controls move some tokens, of fewer than four sequences, a mean gap of more than `FAR` times their largest is
    a fault; nothing else is decided.
"""

from typing import Literal, NamedTuple

import numpy as np

from kvbook.measuring import estimates
from kvbook.scores.tables import Joined

Kind = Literal["exact", "rounding", "fault", "undecided"]

# Nats.  In recorded runs of a model of 135 million parameters fp32 moved no token by as much, and 16 bits moved them by
# a tenth of `PLAIN` in the mean.
FLOOR, PLAIN = 1e-4, 0.5
# Ours: what the sizes of two roundings may differ by in the mean over sequences, and in their largest token.
WITHIN, FAR = 1.5, 4.0
_FEWEST = estimates.FEWEST_UNITS


class Gaps(NamedTuple):
    """What the tables say token by token.

    Attributes
    ----------
    joined : Joined
        The rows.
    log_ratio : ndarray
        log p(trainer) − log p(rollout) of each token.
    controls : ndarray or None
        The same of each control in place of the rollout, shape (controls, tokens).
    """

    joined: Joined
    log_ratio: np.ndarray
    controls: np.ndarray | None

    @property
    def size(self) -> np.ndarray:
        """Gap of each token."""
        return np.abs(self.log_ratio)

    @property
    def n(self) -> int:
        """How many sequences."""
        return len(self.joined.ids)

    def by_sequence(self, values: np.ndarray, where: np.ndarray | None = None) -> np.ndarray:
        """Take the mean of some tokens in each sequence; NaN where it has none of them."""
        of = slice(None) if where is None else where
        sequence = self.joined.sequence[of]
        counts = np.bincount(sequence, minlength=self.n).astype(float)
        sums = np.bincount(sequence, weights=values[of], minlength=self.n)
        return np.divide(sums, counts, out=np.full(self.n, np.nan), where=counts > 0)

    @property
    def largest_of_controls(self) -> float | None:
        """Largest gap of a control."""
        return None if self.controls is None else float(np.abs(self.controls).max())

    @property
    def limit(self) -> float:
        """What a token's gap must exceed to be suspicious."""
        if (largest := self.largest_of_controls) is not None:
            return max(FAR * largest, FLOOR)
        # Without a control, most tokens are taken to be sound.
        return max(10 * float(np.median(self.size)), FLOOR)


def gaps(joined: Joined) -> Gaps:
    """Take all differences to the trainer."""
    controls = [joined.trainer - control for control in joined.controls]
    return Gaps(joined, joined.trainer - joined.rollout, np.array(controls) if controls else None)


def judge(found: Gaps) -> tuple[Kind, str]:
    """Say which, and by which part of the rule, as half a sentence."""
    size, most, mean = found.size, float(found.size.max()), float(found.size.mean())
    if most == 0:
        return "exact", "every log-probability is equal in every digit"
    if most <= FLOOR:
        return "rounding", f"no token moves by more than {most:.1e} nats; rounding in fp32 stays below {FLOOR:.0e}"
    if mean > PLAIN:
        return "fault", f"{mean:.2g} nats in the mean, more than the {PLAIN} that we take rounding to reach"
    if found.controls is None:
        return "undecided", f"{mean:.2g} nats in the mean may be rounding in 16 bits or a fault: give a --control"
    moved = found.controls != 0
    of_controls = np.abs(found.controls)
    per_control = np.array([found.by_sequence(of, where) for of, where in zip(of_controls, moved, strict=True)])
    there = ~np.isnan(per_control).all(0)
    largest = float(of_controls.max())
    if there.sum() < _FEWEST:
        if largest > 0 and mean > max(FAR * largest, FLOOR):
            return "fault", f"{mean:.2g} nats in the mean, against {largest:.2g} at most in the controls"
        less = "no token" if largest == 0 else f"tokens of {there.sum()} sequences alone"
        return "undecided", f"the controls move {less}, so they give no scale: give one of another shape, or more texts"
    if most > FAR * largest and moved.mean() >= 0.5:
        return "fault", f"a token moves by {most:.2g} nats, more than {FAR:g} times the {largest:.2g} of the controls"
    own = np.nan_to_num(found.by_sequence(size, size > 0))[there]
    controls = np.nanmean(per_control[:, there], axis=0)
    # A sequence in which nothing moved has a gap too small to matter, and no logarithm.
    tiny = FLOOR / 100
    ratio = estimates.geometric_mean_ratio(np.maximum(own, tiny), np.maximum(controls, tiny))
    said = f"{ratio.text('{:.2f}')} times the controls' gap, over {there.sum()} sequences"
    if ratio.low > WITHIN:
        return "fault", f"{said}: more than {WITHIN}"
    if side := _one_side(found, there, float(controls.mean())):
        return "fault", side
    if ratio.high < WITHIN:
        return "rounding", f"{said}: less than {WITHIN}"
    return "undecided", f"{said}, which holds {WITHIN}: give more sequences"


def _one_side(found: Gaps, there: np.ndarray, scale: float) -> str | None:
    """Tell whether Δ log p itself has a side that no control has."""
    own = estimates.mean_of(found.by_sequence(found.log_ratio)[there])
    sides = [abs(found.by_sequence(of)[there].mean()) for of in found.controls]
    half, bound = own.high - own.value, scale / 2
    if abs(own.value) - half > bound and max(sides) < bound:
        return f"Δ log p is {own.value:+.2g} ± {half:.1g} nats over {there.sum()} sequences, and rounding has no side"
    return None
