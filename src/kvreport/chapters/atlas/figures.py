"""Figures of the chapter on the atlas."""

from collections.abc import Iterable

import matplotlib.pyplot as plt
import pandas as pd

from kvbook.atlas import PATHS, table
from kvreport.chapters.atlas import tables
from kvreport.chapters.atlas.rows import DIFFERENT, REFUSED
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

# Colour and hatching both say the outcome.
_LOOKS = {
    table.EXACT: (style.GREEN, ""), table.ROUNDING: (style.SKY, ""), table.UNDECIDED: (style.BLUE, ".."),
    table.BUG: (style.VERMILION, "//"), DIFFERENT: (style.VERMILION, "//"), table.RAISES: (style.BLACK, ""),
    table.FED_TWICE: (style.PURPLE, ".."), REFUSED: (style.ORANGE, "\\\\"),
    table.PADDING_CHANGES: (style.ORANGE, "\\\\"), "fails": ("#bbbbbb", "xx"), "no cache": ("#e6e6e6", ""),
    table.NOT_CAUSAL: ("#e6e6e6", "--"), "does not run": ("#bbbbbb", "xx"), table.NOT_TRIED: ("#e6e6e6", ""),
    table.NOT_RECORDED: ("#ffffff", "--"),
}
# A narrower piece has no room for its number, which stands at the end of its bar.
_NARROW = 6


def _bar(ax: plt.Axes, place: int, counted: pd.DataFrame) -> None:
    left, narrow = 0, []
    for row in sorted(counted.itertuples(), key=lambda row: list(_LOOKS).index(row.outcome)):
        colour, hatch = _LOOKS[row.outcome]
        ax.barh(
            place, row.architectures, left=left, height=0.62, color=colour, hatch=hatch, edgecolor="black",
            linewidth=0.6, label=row.outcome,
        )
        if row.architectures < _NARROW:
            narrow.append(str(row.architectures))
        else:
            ax.text(
                left + row.architectures / 2, place, str(row.architectures), ha="center", va="center", fontsize=9.5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
            )
        left += row.architectures
    ax.text(left + 2, place, ", ".join(narrow), ha="left", va="center", fontsize=9)


def _stacked(counted: pd.DataFrame, by: str, known: Iterable[str]) -> plt.Figure:
    places = [place for place in known if place in set(counted[by])]
    fig, ax = style.rows(places, 1.5, 0.42)
    for place, name in enumerate(places):
        _bar(ax, place, counted[counted[by] == name])
    # The numbers of narrow pieces end at the axes' edge.
    ax.margins(x=0.17)
    ax.set_xlabel("architectures")
    handles = {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    return style.with_legend(fig, [handles[outcome] for outcome in _LOOKS if outcome in handles], 3, "upper right")


def figure_outcomes(counted: pd.DataFrame) -> plt.Figure:
    """Draw how many architectures are exact, rounding, wrong, from `tables.outcomes`."""
    return _stacked(counted, "question", tables.OUTCOMES)


def figure_paths(counted: pd.DataFrame) -> plt.Figure:
    """Draw the same by execution path, from the count of paths and outcomes."""
    return _stacked(counted, "path", PATHS)


def figure_operations(counted: pd.DataFrame) -> plt.Figure:
    """Draw the kinds of the first operation that depends on the number of tokens, by dtype."""
    grid = counted.pivot(index="kind", columns="dtype", values="architectures").fillna(0)
    grid = grid.loc[grid.sum(axis=1).sort_values(ascending=False).index]
    dtypes = [dtype for dtype in ("float32", "bfloat16") if dtype in grid]
    fig, ax = style.rows(grid.index, 1.2, 0.5)
    height = 0.8 / len(dtypes)
    for number, dtype in enumerate(dtypes):
        places = [place + (number - (len(dtypes) - 1) / 2) * height for place in range(len(grid))]
        bars = ax.barh(
            places, grid[dtype], height=height, color=style.DTYPE_COLOURS[dtype], label=DTYPES[dtype],
            hatch="" if dtype == "float32" else "//", edgecolor="white", linewidth=0,
        )
        ax.bar_label(bars, fmt="%d", padding=3, fontsize=9.5)
    ax.set_xlabel("architectures")
    ax.margins(x=0.08)
    ax.legend(loc="lower right", fontsize=9)
    return fig
