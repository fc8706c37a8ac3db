"""One picture of two tables: the trainer's log-probabilities against the rollout's, and the gap along the answers."""

from pathlib import Path

import numpy as np

from kvbook.scores.tables import Joined

# More points than this only make the file larger.
_MOST = 20_000


def draw(joined: Joined, title: str, to: Path) -> None:
    """Draw every token, and the mean gap by its place in the answer, with that of the controls."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    some = slice(None, None, max(1, len(joined.rollout) // _MOST))
    left.plot(joined.rollout[some], joined.trainer[some], ".", markersize=3, alpha=0.5, color="#0072b2")
    lowest = float(min(joined.rollout.min(), joined.trainer.min()))
    left.plot([lowest, 0], [lowest, 0], color="0.6", linewidth=1)
    left.set(xlabel="log p, rollout (A)", ylabel="log p, trainer (B)")
    named = [("A", joined.rollout), *((f"control {n}", of) for n, of in enumerate(joined.controls, 1))]
    counts = np.bincount(joined.place)
    for number, (name, values) in enumerate(named):
        gaps = np.bincount(joined.place, weights=np.abs(joined.trainer - values)) / counts
        right.plot(gaps, label=name, color="#d55e00" if number == 0 else "0.6")
    right.set(xlabel="token of the answer", ylabel="mean |Δ log p| to B")
    right.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(to, dpi=150)
