"""The look of every figure, set once.

Axes carry lower-case labels and no titles: a figure's claim is in its caption. Colour never stands alone; a
marker or a line style says the same thing again.
"""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axis import Axis

from kvbook.measuring.estimates import Estimate
from kvreport.publishing import STYLE
from kvreport.publishing.wording import DTYPES

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


def panels(down: int, across: int, height: float, **how) -> tuple[plt.Figure, np.ndarray]:
    """Make panels that are as wide as the page together, in an array of rows and columns however many they are."""
    return plt.subplots(down, across, squeeze=False, figsize=(WIDTH, height), **how)


def plain_logarithm(axis: Axis, at: Sequence[float] = (1, 2, 5)) -> None:
    """Label a logarithmic axis with plain numbers, at 1, 2 and 5 of each decade or elsewhere: more run together."""
    axis.set_major_locator(plt.LogLocator(subs=at))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


DTYPE_COLOURS = {"float64": BLACK, "float32": BLUE, "float16": GREEN, "bfloat16": VERMILION}


# How the book's values stand behind a run's own.
FAINT = {"linewidth": 6, "alpha": 0.3, "markersize": 11}
# A line to compare with, such as at a ratio of 1.
REFERENCE = {"color": GREY, "linewidth": 1, "linestyle": ":"}


def key(label: str, colour: str = GREY, **look) -> plt.Line2D:
    """Make an entry of a legend: a marker alone where one is named, else a line."""
    return plt.Line2D([], [], color=colour, label=label, **{"linestyle": "" if "marker" in look else "-"} | look)


def with_legend(
    fig: plt.Figure, handles: Sequence[plt.Artist], ncols: int, where: str = "upper center", fontsize: float = 9, **look
) -> plt.Figure:
    """Put a legend beside a figure's axes, and give the figure."""
    fig.legend(handles=handles, loc=f"outside {where}", ncols=ncols, fontsize=fontsize, **look)
    return fig


def dtype_keys(dtypes: Iterable[str], markers: Mapping[str, str] | None = None) -> list[plt.Line2D]:
    """Make a legend's entries for dtypes: a line in each one's colour, or its marker."""
    looks = {d: {"marker": markers[d]} if markers else {"linewidth": 3} for d in dict.fromkeys(dtypes)}
    return [key(DTYPES[d], DTYPE_COLOURS[d], **look) for d, look in looks.items()]


def solid_and_dashed(dtypes: Iterable[str], solid: str, dashed: str) -> list[plt.Line2D]:
    """Make a legend's entries for dtypes, and for two kinds of lines: filled and solid, hollow and dashed."""
    hollow = key(dashed, marker="o", linestyle="--", markerfacecolor="white")
    return [*dtype_keys(dtypes), key(solid, marker="o", linestyle="-"), hollow]


def ends(estimates: Iterable[Estimate], down_to: float = 0) -> np.ndarray:
    """Return how far the ends of intervals lie from their estimates, as `Axes.errorbar` takes them.

    On a logarithmic axis an end at 0 has no place: it is drawn at the share `down_to` of the value.
    """
    lows = ((one, max(one.low, down_to * one.value) if down_to else one.low) for one in estimates)
    # Rounding may leave an end on the wrong side of its estimate.
    return np.array([(one.value - low, one.high - one.value) for one, low in lows]).T.clip(0)


def note(ax: plt.Axes, text: str, at: tuple[float, float], shift: tuple[float, float] = (0, 0), **look) -> None:
    """Write beside a point, shifted from it by so many points of type."""
    ax.annotate(text, at, shift, textcoords="offset points", **{"fontsize": 9, "color": GREY} | look)


def plot_estimate(
    ax: plt.Axes, estimate: Estimate, place: float, down_to: float = 0, upright: bool = False, **look
) -> None:
    """Draw an estimate and its interval at a place of the other axis; `down_to` as for `ends`."""
    at, along = ((place, estimate.value), "yerr") if upright else ((estimate.value, place), "xerr")
    ax.errorbar(*at, **{along: ends([estimate], down_to), "linestyle": ""} | look)


def name_rows(ax: plt.Axes, names: Sequence[str], above: float = 0.5, **look) -> None:
    """Name rows from the top down."""
    ax.set_yticks(range(len(names)), names, **look)
    ax.set_ylim(len(names) - 0.5, -above)
    ax.grid(axis="y", visible=False)


def rows(names: Sequence[str], room: float, each: float, **look) -> tuple[plt.Figure, plt.Axes]:
    """Make axes of named rows: each of so many inches, and so much room for the rest."""
    fig, ax = plt.subplots(figsize=(WIDTH, room + each * len(names)))
    name_rows(ax, names, **look)
    return fig, ax


def name_cells(ax: plt.Axes, names: Sequence[str], **look) -> None:
    """Name the rows of a map, whose cells are one high, from the top down."""
    ax.set_yticks(np.arange(len(names)) + 0.5, names, **{"fontsize": 9} | look)
    ax.set_ylim(len(names), 0)
    ax.grid(visible=False)
    ax.tick_params(length=0)


def plot_estimates(table: pd.DataFrame, ax: plt.Axes, reference: float, form: str) -> None:
    """Draw estimates with their intervals, a line each, the value written above; what is published is hollow."""
    for place, row in enumerate(table.itertuples()):
        colour, inside = (GREY, "white") if row.published else (BLUE, BLUE)
        plot_estimate(ax, row.estimate, place, marker="o", color=colour, markerfacecolor=inside)
        value = row.estimate.value
        note(ax, form.format(value), (value, place), (0, 6), ha="center", fontsize=8.5, color=colour)
    ax.axvline(reference, **REFERENCE)
    name_rows(ax, table["label"], above=0.8)
