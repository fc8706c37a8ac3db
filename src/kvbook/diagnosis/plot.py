"""One picture of a check: drift against roundoff, and where rounding ends."""

from pathlib import Path
from typing import TextIO

from kvbook.diagnosis.outcome import Outcome
from kvbook.diagnosis.verdict import LIMIT
from kvbook.measuring import UNIT_ROUNDOFF


def draw(found: Outcome, to: Path | TextIO, kind: str = "png") -> None:
    """Draw each dtype's mean drift on logarithmic axes, with one roundoff and the most that rounding can be."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    ends = [min(UNIT_ROUNDOFF.values()) / 4, max(UNIT_ROUNDOFF.values()) * 4]
    axes.plot(ends, ends, color="0.6", label="one roundoff")
    axes.plot(ends, [LIMIT * end for end in ends], color="0.6", linestyle="--", label="the most that rounding can be")
    # What is equal in every bit, or infinite, has no place on logarithmic axes.
    shown = [drift for drift in found.drift if drift.mean]
    axes.plot(
        [UNIT_ROUNDOFF[drift.dtype] for drift in shown], [drift.mean for drift in shown],
        marker="o", color="#d55e00" if found.verdict == "bug" else "#0072b2", label=f"{found.path}: {found.verdict}",
    )
    for drift in shown:
        axes.annotate(drift.dtype, (UNIT_ROUNDOFF[drift.dtype], drift.mean), (6, -10), textcoords="offset points")
    axes.set(
        xscale="log", yscale="log", xlim=ends, xlabel="unit roundoff", ylabel="drift / spread of the logits",
        title=f"{found.model}: full pass against cache",
    )
    axes.legend(fontsize="small")
    figure.savefig(to, dpi=150, format=kind)
