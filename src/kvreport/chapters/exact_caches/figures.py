"""Figures of the chapter on exact caches. Colour is the dtype; in the map it is the share of identical rows."""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap

from kvreport.chapters.exact_caches.rows import EXACT, STOCK
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES, percent

_SHADES = LinearSegmentedColormap.from_list("identical", ["white", "#7ab8dc"])


def _grid(shares: pd.DataFrame, dtype: str) -> pd.DataFrame:
    """Lay out one dtype's shares: a row per model with stock arithmetic, and one for the mode over all."""
    of_dtype = shares[shares["dtype"] == dtype]
    stock, exact = (of_dtype[of_dtype["arithmetic"] == name] for name in (STOCK, EXACT))
    grid = stock.pivot(index="model", columns="way", values="share")
    grid.loc["row-invariant: the lowest"] = exact.groupby("way")["share"].min()
    return grid.loc[[*dict.fromkeys(stock["model"]), "row-invariant: the lowest"], list(dict.fromkeys(shares["way"]))]


def figure_ways(shares: pd.DataFrame, book: pd.DataFrame | None = None) -> plt.Figure:
    """Map the share of identical rows by model and way, from the frame of shares; the book's stands in brackets."""
    dtypes = list(dict.fromkeys(shares["dtype"]))
    grids = {dtype: _grid(shares, dtype) for dtype in dtypes}
    lines, height = len(grids[dtypes[0]]), 0.3 if book is None else 0.42
    fig, axes = style.panels(len(dtypes), 1, 0.9 + len(dtypes) * (0.35 + height * lines), sharex=True)
    for ax, (dtype, grid) in zip(axes[:, 0], grids.items(), strict=True):
        ax.pcolormesh(grid.to_numpy(), cmap=_SHADES, vmin=0, vmax=1, edgecolors="#dddddd", linewidth=0.6)
        theirs = None if book is None or dtype not in set(book["dtype"]) else _grid(book, dtype)
        for (line, column), share in np.ndenumerate(grid.to_numpy()):
            model, way = grid.index[line], grid.columns[column]
            text = percent(share).rstrip("%")
            if theirs is not None and model in theirs.index and way in theirs:
                text += f"\n({percent(theirs.loc[model, way]).rstrip('%')})"
            ax.text(column + 0.5, line + 0.5, text, ha="center", va="center", fontsize=8.5)
        ax.axhline(len(grid) - 1, color="black", linewidth=1)
        style.name_cells(ax, grid.index, fontsize=8.5)
        ax.set_xticks(np.arange(grid.shape[1]) + 0.5, [textwrap.fill(way, 9) for way in grid.columns], fontsize=8.5)
        ax.set_title(DTYPES[dtype], loc="left", fontsize=10, fontweight="bold", color=style.DTYPE_COLOURS[dtype], pad=3)
    return fig


def figure_ladder(table: pd.DataFrame) -> plt.Figure:
    """Draw share of identical rows and error for every rung."""
    rungs, dtypes = (list(dict.fromkeys(table[name])) for name in ("rung", "dtype"))
    fig, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(style.WIDTH, 3.4))
    for index, (dtype, rows) in enumerate(table.groupby("dtype", sort=False)):
        place = rows["rung"].map(rungs.index) + 0.18 * (index - (len(dtypes) - 1) / 2)
        drawn = {"color": style.DTYPE_COLOURS[dtype], "marker": style.MARKERS[index], "linestyle": "", "markersize": 5}
        left.plot(rows["share"], place, **drawn)
        stock = rows.loc[rows["rung"] == STOCK, "error"].iloc[0]
        right.plot(rows["error"] / stock, place, label=DTYPES[dtype], **drawn)
    left.set(xlabel="share of identical rows", xlim=(-0.07, 1.07))
    left.set_yticks(range(len(rungs)), rungs)
    left.invert_yaxis()
    right.axvline(1, **style.REFERENCE)
    right.set_xlabel("error / stock's")
    fig.legend(loc="outside upper center", ncols=3)
    return fig
