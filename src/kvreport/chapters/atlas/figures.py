"""Figures of the chapter on the atlas."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvreport.chapters.atlas import tables
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

# Colour and hatching both say the outcome.
_LOOKS = {
    tables.EXACT: (style.GREEN, ""),
    tables.ROUNDING: (style.SKY, ""),
    "undecided": (style.PURPLE, ".."),
    tables.BUG: (style.VERMILION, "//"),
    tables.DIFFERENT: (style.VERMILION, "//"),
    tables.REFUSED: (style.ORANGE, "\\\\"),
    "padding counts": (style.ORANGE, "\\\\"),
    "fails": ("#bbbbbb", "xx"),
    "no cache": ("#e6e6e6", ""),
    "not causal": ("#e6e6e6", "--"),
    "does not run": ("#bbbbbb", "xx"),
    tables.NOT_ASKED: ("#e6e6e6", ""),
}
# A narrower piece has no room for its number.
_NARROW = 6


def _bar(ax: Axes, place: int, counted: pd.DataFrame, seen: set[str]) -> None:
    left = 0
    order = sorted(counted.itertuples(), key=lambda row: list(_LOOKS).index(row.outcome))
    for row in order:
        colour, hatch = _LOOKS[row.outcome]
        ax.barh(
            place, row.architectures, left=left, height=0.62, color=colour, hatch=hatch, edgecolor="black",
            linewidth=0.6, label=None if row.outcome in seen else row.outcome,
        )  # fmt: skip
        seen.add(row.outcome)
        if row.architectures >= _NARROW:
            ax.text(
                left + row.architectures / 2, place, str(row.architectures), ha="center", va="center", fontsize=9.5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
            )  # fmt: skip
        left += row.architectures


def _stacked(counted: pd.DataFrame, by: str, places: list[str]) -> Figure:
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.3 + 0.42 * len(places)))
    seen: set[str] = set()
    for place, name in enumerate(places):
        _bar(ax, place, counted[counted[by] == name], seen)
    ax.set_yticks(range(len(places)), places)
    ax.set_ylim(len(places) - 0.5, -0.5)
    ax.set_xlabel("architectures")
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside upper right", ncols=4, fontsize=9)
    return fig


def figure_outcomes(counted: pd.DataFrame) -> Figure:
    """Draw how many architectures are exact, rounding, wrong, from `tables.outcomes`."""
    return _stacked(
        counted, "question", [question for question in tables.OUTCOMES if question in set(counted["question"])]
    )


def figure_paths(counted: pd.DataFrame) -> Figure:
    """Draw the same by execution path, from `tables.by_path`."""
    return _stacked(counted, "path", [path for path in tables.PATHS if path in set(counted["path"])])


def figure_operations(counted: pd.DataFrame) -> Figure:
    """Draw the kinds of the first operation that depends on the number of tokens, from `tables.first_operations`."""
    grid = counted.pivot(index="kind", columns="dtype", values="architectures").fillna(0)
    grid = grid.loc[grid.sum(axis=1).sort_values(ascending=False).index]
    dtypes = [dtype for dtype in ("float32", "bfloat16") if dtype in grid]
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.2 + 0.5 * len(grid)))
    height = 0.8 / len(dtypes)
    for number, dtype in enumerate(dtypes):
        places = [place + (number - (len(dtypes) - 1) / 2) * height for place in range(len(grid))]
        bars = ax.barh(
            places, grid[dtype], height=height, color=style.DTYPE_COLOURS[dtype], label=DTYPES[dtype],
            hatch="" if dtype == "float32" else "//", edgecolor="white", linewidth=0,
        )  # fmt: skip
        ax.bar_label(bars, fmt="%d", padding=3, fontsize=9.5)
    ax.set_yticks(range(len(grid)), list(grid.index))
    ax.set_ylim(len(grid) - 0.5, -0.5)
    ax.set_xlabel("architectures")
    ax.margins(x=0.08)
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right", fontsize=9)
    return fig
