"""Figures of the chapter on where drift begins.

Every map runs from light (bits equal) to dark, so that a grey print and a reader who tells few colours apart see the
same thing.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection, QuadMesh
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from kvreport.chapters.where_drift_begins import rows as named
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

LIGHT = "#e8e8e8"
_HATCH_COLOUR = "white"


def _plot_states(ax: Axes, grid: np.ndarray, x: np.ndarray, colours: list[str], hatches: list[str]) -> None:
    """Draw a map of categories; `x` holds the edges of the columns, and a negative entry leaves a cell white."""
    norm = BoundaryNorm(range(len(colours) + 1), len(colours))
    shown = np.ma.masked_less(grid, 0)
    y = np.arange(len(grid) + 1)
    # Lines between many narrow cells would hide them.
    lines = {"edgecolors": "white", "linewidth": 0.3} if grid.shape[1] < 50 else {}
    ax.pcolormesh(x, y, shown, cmap=ListedColormap(colours), norm=norm, **lines)
    ax.hlines(y[1:-1], x[0], x[-1], color="white", linewidth=1)
    for state, hatch in enumerate(hatches):
        if hatch:
            cells = [
                Rectangle((x[column], row), x[column + 1] - x[column], 1) for row, column in np.argwhere(grid == state)
            ]
            ax.add_collection(
                PatchCollection(cells, facecolor="none", edgecolor=_HATCH_COLOUR, hatch=hatch, linewidth=0)
            )
    ax.set_ylim(len(grid), 0)
    ax.grid(visible=False)
    ax.tick_params(length=0)


def _legend(fig: Figure, names: list[str], colours: list[str], hatches: list[str], occurring: set[str]) -> None:
    handles = [
        Patch(facecolor=colour, edgecolor=_HATCH_COLOUR if hatch else "#444444", hatch=hatch, linewidth=0.5, label=name)
        for name, colour, hatch in zip(names, colours, hatches, strict=True)
        if name in occurring
    ]
    fig.legend(handles=handles, loc="outside upper left", ncols=2, fontsize=9.5, columnspacing=1, handlelength=1.6)


# White is none; a share that rounds to none is still not white.
_SHARES = plt.get_cmap("Blues")


def _colour_bar(fig: Figure, mesh: QuadMesh, axes: list[Axes], label: str) -> None:
    bar = fig.colorbar(mesh, ax=axes, location="top", shrink=0.6, aspect=30, pad=0.02)
    bar.set_ticks([0, 0.5, 1], labels=["0", "½", "all"])
    bar.set_label(label, fontsize=9.5)
    bar.ax.tick_params(labelsize=9, length=0)
    bar.outline.set_linewidth(0.5)


def plot_operations(shares: pd.DataFrame, ax: Axes) -> QuadMesh:
    """Draw layers against operations, in the order in which they run."""
    names = list(shares.sort_values("order").drop_duplicates("operation")["operation"])
    first, last = int(shares["layer"].min()), int(shares["layer"].max())
    grid = np.full((len(names), last - first + 1), np.nan)
    for row in shares.itertuples():
        grid[names.index(row.operation), row.layer - first] = row.share
    edges = np.arange(first, last + 2) - 0.5
    mesh = ax.pcolormesh(
        edges, np.arange(len(names) + 1), np.ma.masked_invalid(grid), cmap=_SHARES, vmin=0, vmax=1,
        edgecolors="#dddddd", linewidth=0.3,
    )
    ax.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=9)
    ticks = [0, (last - 1) // 2, last - 1]
    ax.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=9.5)
    ax.set_ylim(len(names), 0)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    return mesh


def figure_operations(shares: pd.DataFrame) -> Figure:
    """Draw `plot_operations` for every dtype of the first model, side by side."""
    first = shares.iloc[0]
    rows = shares[(shares["model"] == first["model"]) & (shares["attention"] == first["attention"])]
    dtypes = list(dict.fromkeys(rows["dtype"]))
    count = rows["operation"].nunique()
    fig, axes = plt.subplots(1, len(dtypes), sharey=True, squeeze=False, figsize=(style.WIDTH, 1.5 + 0.2 * count))
    for ax, dtype in zip(axes[0], dtypes, strict=True):
        mesh = plot_operations(rows[rows["dtype"] == dtype], ax)
        ax.set_title(DTYPES[dtype], fontsize=10)
        ax.set_xlabel("layer")
    _colour_bar(fig, mesh, list(axes[0]), "share of texts in which the last row, alone, differs")
    return fig


# Letters of a name that fit a column of six.
_LONG_NAME = 9


def plot_kinds(shares: pd.DataFrame, names: list[str], columns: list[tuple[str, str]], ax: Axes) -> Axes:
    """Draw the share of calls that differ locally: kinds of operation against models."""
    grid = np.full((len(names), len(columns)), np.nan)
    for row in shares.itertuples():
        if row.kind in names:
            grid[names.index(row.kind), columns.index((row.model, row.attention))] = row.share
    ax.pcolormesh(np.ma.masked_invalid(grid), cmap=_SHARES, vmin=0, vmax=1, edgecolors="#dddddd", linewidth=0.8)
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = "0" if value == 0 else f"{value:.0%}" if value >= 0.005 else "<1%"
            ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9.5,
                    color="white" if value > 0.55 else "#222222")
    ax.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=9.5)
    # Names of hub ids and folders are longer than a column is wide: their first part.
    labels = [model.rpartition("/")[2].partition("-")[0][:_LONG_NAME] for model, _ in columns]
    plain = [attention == "eager" and model != "mpt" for model, attention in columns]
    labels = [label + "\neager" * eager for label, eager in zip(labels, plain, strict=True)]
    ax.set_xticks(np.arange(len(columns)) + 0.5, labels, fontsize=9)
    ax.set_ylim(len(names), 0)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    return ax


def _kinds(shares: pd.DataFrame) -> list[str]:
    return [kind for kind in named.KINDS if kind in set(shares["kind"])]


def figure_kinds(shares: pd.DataFrame) -> Figure:
    """Draw `plot_kinds` for every dtype and both passes of a cached step; kinds that never differ are left out."""
    passes = (named.LAST_ONE, named.PREFILL)
    columns = list(dict.fromkeys(zip(shares["model"], shares["attention"], strict=True)))
    names = _kinds(shares[shares["share"] > 0]) or _kinds(shares)
    panels = [(dtype, name) for name in passes for dtype in dict.fromkeys(shares["dtype"])]
    # Many models need the whole width, or their numbers cannot be read on a telephone.
    across = len(passes) if len(columns) <= 4 else 1
    down = len(panels) // across
    height = 0.35 + 0.26 * len(names)
    fig, axes = plt.subplots(
        down, across, sharex=True, sharey=True, squeeze=False, figsize=(style.WIDTH, 0.8 + height * down)
    )
    for ax, (dtype, name) in zip(axes.T.flat, panels, strict=True):
        plot_kinds(shares[(shares["dtype"] == dtype) & (shares["pass"] == name)], names, columns, ax)
        shown = "last row alone" if name == named.LAST_ONE else name
        ax.set_title(f"{DTYPES[dtype]}, {shown}", fontsize=9.5, loc="left", pad=2)
    return fig


_GEMM_COLOURS = [LIGHT, style.BLUE, style.VERMILION]
_GEMM_HATCHES = ["", "////", ""]


def plot_gemm(states: pd.DataFrame, ax: Axes) -> Axes:
    """Draw the number of rows against K."""
    sizes = sorted(states["inner_size"].unique())
    most = int(states["rows"].max())
    grid = np.full((len(sizes), most), -1)
    for row in states.itertuples():
        grid[sizes.index(row.inner_size), row.rows - 1] = named.STATES.index(row.state)
    _plot_states(ax, grid, np.arange(most + 1) + 0.5, _GEMM_COLOURS, _GEMM_HATCHES)
    ax.set_xscale("log", base=2)
    ticks = [2**power for power in range(most.bit_length()) if 2**power <= most]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_yticks(np.arange(len(sizes)) + 0.5, [str(size) for size in sizes], fontsize=9)
    return ax


def figure_gemm(states: pd.DataFrame) -> Figure:
    """Draw `plot_gemm` for every dtype and number of threads, one under the other."""
    groups = list(states.groupby(["dtype", "threads"], sort=False))
    sizes = states["inner_size"].nunique()
    fig, axes = plt.subplots(
        len(groups), 1, sharex=True, squeeze=False, figsize=(style.WIDTH, 1.3 + len(groups) * (0.32 + 0.19 * sizes))
    )
    for ax, ((dtype, threads), rows) in zip(axes[:, 0], groups, strict=True):
        plot_gemm(rows, ax)
        ax.set_title(f"{DTYPES[dtype]}, {threads} thread{'s' * (threads > 1)}", loc="left", fontsize=9.5, pad=2)
    fig.supylabel("K (reduction size)", fontsize=10)
    axes[-1, 0].set_xlabel("query length (rows of the product)")
    _legend(fig, list(named.STATES), _GEMM_COLOURS, _GEMM_HATCHES, set(states["state"]))
    return fig


def figure_lengths(shares: pd.DataFrame) -> Figure:
    """Draw for every length in how many texts bits differ: two strips for each dtype and attention."""
    groups = list(shares.groupby(["attention", "dtype"], sort=False))
    lengths = sorted(shares["n_tokens"].unique())
    grid = np.full((2 * len(groups), len(lengths)), np.nan)
    for place, (_, rows) in enumerate(groups):
        columns = [lengths.index(length) for length in rows["n_tokens"]]
        grid[2 * place, columns], grid[2 * place + 1, columns] = rows["logits"], rows["cache"]
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.5 + 0.26 * len(grid)))
    edges = np.append(lengths, lengths[-1] + 1) - 0.5
    mesh = ax.pcolormesh(edges, np.arange(len(grid) + 1), np.ma.masked_invalid(grid), cmap=_SHARES, vmin=0, vmax=1)
    ax.hlines(np.arange(1, len(grid)), edges[0], edges[-1], color="white", linewidth=1)
    ax.hlines(np.arange(2, len(grid), 2), edges[0], edges[-1], color="#444444", linewidth=0.8)
    names = [
        f"{attention}, {DTYPES[dtype]}: {what}" for (attention, dtype), _ in groups for what in ("logits", "cache")
    ]
    ax.set_yticks(np.arange(len(grid)) + 0.5, names, fontsize=9)
    apart = 32 if lengths[-1] >= 64 else 4
    ax.set_xticks([length for length in lengths if length % apart == 0])
    ax.set_xlabel("tokens, the last one scored on a cache")
    ax.set_ylim(len(grid), 0)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    _colour_bar(fig, mesh, [ax], "share of texts that differ")
    return fig


def plot_forms(shares: pd.DataFrame, ax: Axes) -> QuadMesh:
    """Draw the share of rows that differ from the causal pass: forms against numbers of keys."""
    forms, lengths = list(named.FORMS), sorted(shares["keys"].unique())
    grid = np.full((len(forms), len(lengths)), np.nan)
    for row in shares.itertuples():
        grid[forms.index(row.form), lengths.index(row.keys)] = row.share
    mesh = ax.pcolormesh(np.ma.masked_invalid(grid), cmap=_SHARES, vmin=0, vmax=1, edgecolors="#dddddd", linewidth=0.5)
    for (row, column), value in np.ndenumerate(grid):
        # A share that is drawn as none is not none.
        if np.isfinite(value) and 0 < value < 0.1:
            ax.text(column + 0.5, row + 0.5, "·", ha="center", va="center", fontsize=9, color="#222222")
    ax.set_yticks(np.arange(len(forms)) + 0.5, forms, fontsize=9)
    ax.set_xticks(np.arange(len(lengths)) + 0.5, [str(length) for length in lengths], fontsize=9, rotation=90)
    ax.set_ylim(len(forms), 0)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    return mesh


def figure_forms(shares: pd.DataFrame) -> Figure:
    """Draw `plot_forms` for every kernel (down) and dtype (across)."""
    kernels, dtypes = (list(dict.fromkeys(shares[name])) for name in ("kernel", "dtype"))
    fig, axes = plt.subplots(
        len(kernels),
        len(dtypes),
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=(style.WIDTH, 1.6 + 2 * len(kernels)),
    )
    for row, kernel in zip(axes, kernels, strict=True):
        for ax, dtype in zip(row, dtypes, strict=True):
            mesh = plot_forms(shares[(shares["kernel"] == kernel) & (shares["dtype"] == dtype)], ax)
            ax.set_title(f"{kernel}, {DTYPES[dtype]}", fontsize=9.5, loc="left", pad=2)
    for ax in axes[-1]:
        ax.set_xlabel("keys")
    _colour_bar(fig, mesh, list(axes.flat), "share of rows that differ from the causal pass")
    return fig


_QUERY_STYLE = {named.ONE_ROW: (style.VERMILION, "o"), named.ALL_ROWS: (style.BLUE, "s")}


def plot_factorial(table: pd.DataFrame, ax: Axes) -> Axes:
    """Draw the drift by who wrote the cache, one mark a query; a drift of 0 is hollow."""
    for row in table.itertuples():
        colour, marker = _QUERY_STYLE[row.query]
        place = named.SOURCES.index(row.cache) + (0.16 if row.query == named.ALL_ROWS else -0.16)
        drift = row.drift
        ax.errorbar(
            drift.value, place, xerr=[[max(drift.value - drift.low, 0)], [max(drift.high - drift.value, 0)]],
            color=colour, marker=marker, markersize=6, linestyle="", markerfacecolor="white" if drift.value == 0
                else colour,
        )
    ax.set_yticks(range(len(named.SOURCES)), named.SOURCES, fontsize=9.5)
    ax.set_ylim(len(named.SOURCES) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    return ax


def figure_factorial(table: pd.DataFrame) -> Figure:
    """Draw `plot_factorial` for every dtype (down) and length (across)."""
    dtypes, lengths = (list(dict.fromkeys(table[name])) for name in ("dtype", "n_tokens"))
    fig, axes = plt.subplots(
        len(dtypes),
        len(lengths),
        sharey=True,
        sharex="row",
        squeeze=False,
        figsize=(style.WIDTH, 1.1 + 1.25 * len(dtypes)),
    )
    for row, dtype in zip(axes, dtypes, strict=True):
        for ax, length in zip(row, lengths, strict=True):
            plot_factorial(table[(table["dtype"] == dtype) & (table["n_tokens"] == length)], ax)
            ax.set_title(f"{DTYPES[dtype]}, {length} tokens", fontsize=9.5, loc="left", pad=2)
        right = row[0].get_xlim()[1]
        row[0].set_xlim(-0.04 * right, right)
    fig.supxlabel("relative drift of the logits / unit roundoff", fontsize=10)
    fig.supylabel("keys and values written by", fontsize=10)
    handles = [
        plt.Line2D([], [], color=colour, marker=marker, linestyle="", label=f"last token as {query}")
        for query, (colour, marker) in _QUERY_STYLE.items()
    ]
    handles.append(
        plt.Line2D([], [], color=style.GREY, marker="o", markerfacecolor="white", linestyle="", label="hollow: 0")
    )
    fig.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=9.5, columnspacing=1, handletextpad=0.2)
    return fig
