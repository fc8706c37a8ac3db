"""The look of every figure, set once.

Axes carry lower-case labels and no titles: a figure's claim is in its caption. Colour never stands alone; a
marker or a line style says the same thing again.
"""

from collections.abc import Iterable

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator

from kvbook.measuring.estimates import Estimate
from kvreport.publishing import STYLE

# Okabe and Ito's palette, told apart by readers with any common colour vision deficiency. For lines and
# markers only its colours with a contrast of at least 3 : 1 on white.
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
BLACK = "#000000"
# For areas with a dark edge; too light for a line.
SKY = "#56B4E9"
ORANGE = "#E69F00"
# What is published elsewhere, and reference lines: beside ours, never louder.
GREY = "#666666"

PALETTE = (BLUE, VERMILION, GREEN, PURPLE, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P")

# The width, in inches, at which 11 pt text stays readable when a telephone shrinks the figure to its screen.
WIDTH = 5.6


def use() -> None:
    """Use the book's style for every figure drawn from here on."""
    plt.style.use(STYLE)


def plain_logarithm(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, at 1, 2 and 5 of each decade: more run together."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


DTYPE_COLOURS = {
    "float64": BLACK,
    "float32": BLUE,
    "float16": GREEN,
    "bfloat16": VERMILION,
}


def ends(estimates: Iterable[Estimate]) -> np.ndarray:
    """Return how far the ends of intervals lie from their estimates, as `Axes.errorbar` takes them."""
    return np.array([(one.value - one.low, one.high - one.value) for one in estimates]).T


def plot_estimates(table: pd.DataFrame, ax: Axes, reference: float | None = None, form: str = "{:.3g}") -> Axes:
    """Draw estimates with their intervals, a line each, the value written beside."""
    for place, row in enumerate(table.itertuples()):
        estimate: Estimate = row.estimate
        colour = GREY if row.published else BLUE
        ax.errorbar(
            estimate.value, place, xerr=ends([estimate]), fmt="o", color=colour,
            markerfacecolor="white" if row.published else colour,
        )
        ax.annotate(
            form.format(estimate.value), (estimate.value, place), xytext=(0, 6), textcoords="offset points",
            ha="center", fontsize=8.5, color=colour,
        )
    if reference is not None:
        ax.axvline(reference, color=GREY, linewidth=1, linestyle=":")
    ax.set_yticks(range(len(table)), table["label"])
    ax.set_ylim(len(table) - 0.4, -0.8)
    ax.grid(axis="y", visible=False)
    return ax
