"""The verdict on a server: reuse must not move log-probabilities further than the server moves them without it.

The bounds are those of `kvbook scores`.  A reused prefix is wrong for single requests, so each comparison is judged by
itself, by its largest |Δ log p| and its mean, against the largest over all controls.

- No log-probability moves: exact.
- None moves by more than `FLOOR`: rounding of fp32, for which no control is needed.
- The mean is above `PLAIN`: a fault, for which no control is needed either.
- At most `FAR` times the controls' largest: rounding, or batching.  More: a fault.
- No control moved, or none could be made: nothing shows how much is usual in the shapes of reuse, so the answer is
  "cannot tell".  So it is where the controls' own mean is above `PLAIN`, which would hide everything.
"""

from collections.abc import Sequence
from typing import Literal

from kvbook.scores.verdict import FAR, FLOOR, PLAIN
from kvbook.server.comparisons import CONTROLS, Comparison

Verdict = Literal["exact", "rounding", "fault", "cannot tell"]


def controls(comparisons: Sequence[Comparison]) -> tuple[float | None, float]:
    """Return the largest |Δ log p| without reuse, None where none was measured, and the largest mean."""
    moved = [each.differences() for each in comparisons if each.kind in CONTROLS]
    largest, means = [float(each.max()) for each in moved], [float(each.mean()) for each in moved]
    return max(largest, default=None), max(means, default=0.0)


def judge(largest: float, mean: float, usual: float | None, noise: float = 0.0) -> Verdict:
    """Judge one comparison by how far the server moves log-probabilities without reuse."""
    if largest == 0:
        return "exact"
    if noise > PLAIN:
        return "cannot tell"
    if largest <= FLOOR:
        return "rounding"
    if mean > PLAIN:
        return "fault"
    if not usual:
        return "cannot tell"
    return "rounding" if largest <= FAR * usual else "fault"
