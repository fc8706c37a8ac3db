"""Figures of the chapter on where drift begins.

Every map runs from light (bits equal) to dark, so that a grey print and a reader who tells few colours apart see the
same thing.
"""

import itertools
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.collections import PatchCollection, QuadMesh
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from kvreport.chapters.where_drift_begins import rows as named
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES, percent

# What a product of fewer rows is drawn with, by how it compares with that of the most rows.
_STATES = dict(zip(named.STATES, [("#e8e8e8", ""), (style.BLUE, "////"), (style.VERMILION, "")], strict=True))
_HATCH_COLOUR = "white"
_QUERIES = {named.ONE_ROW: (style.VERMILION, "o", -0.16), named.ALL_ROWS: (style.BLUE, "s", 0.16)}
# Letters of a model's name that fit a column of six.
_LONG_NAME = 9


def _plot_shares(ax: plt.Axes, grid: pd.DataFrame, **look) -> QuadMesh:
    """Draw a map of shares, its rows from the top down; white is none, and a share that rounds to none is not white."""
    edges = np.arange(grid.shape[1] + 1) + grid.columns[0] - 0.5, np.arange(len(grid) + 1)
    look = {"edgecolors": "#dddddd", "linewidth": 0.3} | look
    mesh = ax.pcolormesh(*edges, np.ma.masked_invalid(grid), cmap="Blues", vmin=0, vmax=1, **look)
    style.name_cells(ax, grid.index)
    return mesh


def _plot_words(ax: plt.Axes, grid: pd.DataFrame, say: Callable[[float], str], linewidth: float) -> QuadMesh:
    """Draw a map of shares, with what is said of each in its cell."""
    words = grid.map(say, na_action="ignore")
    look = {"cmap": "Blues", "vmin": 0, "vmax": 1, "cbar": False, "linewidths": linewidth, "linecolor": "#dddddd"}
    # seaborn draws the figure to see whether labels overlap; ours do not, and laying it out each time takes seconds.
    layout = ax.figure.get_layout_engine()
    ax.figure.set_layout_engine("none")
    sns.heatmap(grid, ax=ax, annot=words, fmt="", annot_kws={"fontsize": 9.5}, **look)
    ax.figure.set_layout_engine(layout)
    style.name_cells(ax, grid.index, rotation=0)
    ax.set(xlabel="", ylabel="")
    return ax.collections[0]


def _colour_bar(fig: plt.Figure, mesh: QuadMesh, axes: list[plt.Axes], label: str) -> None:
    bar = fig.colorbar(mesh, ax=axes, location="top", shrink=0.6, aspect=30, pad=0.02)
    bar.set_ticks([0, 0.5, 1], labels=["0", "½", "all"])
    bar.set_label(label, fontsize=9.5)
    bar.ax.tick_params(labelsize=9, length=0)
    bar.outline.set_linewidth(0.5)


def figure_operations(shares: pd.DataFrame) -> plt.Figure:
    """Draw layers against operations, in the order in which they run, for every dtype of the first model."""
    first = shares.iloc[0]
    of_first = shares[(shares["model"] == first["model"]) & (shares["attention"] == first["attention"])]
    dtypes, count = of_first["dtype"].unique(), of_first["operation"].nunique()
    fig, axes = style.panels(1, len(dtypes), 1.5 + 0.2 * count, sharey=True)
    for ax, dtype in zip(axes[0], dtypes, strict=True):
        of = of_first[of_first["dtype"] == dtype].sort_values("order")
        grid = of.pivot(index="operation", columns="layer", values="share").loc[of["operation"].unique()]
        mesh = _plot_shares(ax, grid)
        # What runs after the layers stands in a column of its own.
        last = grid.columns[-1] - 1
        ax.set_xticks([0, last // 2, last])
        ax.tick_params(axis="x", labelsize=9.5)
        ax.set_title(DTYPES[dtype], fontsize=10)
        ax.set_xlabel("layer")
    _colour_bar(fig, mesh, list(axes[0]), "share of texts in which the last row, alone, differs")
    return fig


def _kinds(shares: pd.DataFrame) -> list[str]:
    return [kind for kind in named.KINDS if kind in set(shares["kind"])]


def _short(model: str, attention: str) -> str:
    """Name a column: hub ids and folders are longer than it is wide, so by the first part of their names."""
    name = model.rpartition("/")[2].partition("-")[0][:_LONG_NAME]
    return name + "\neager" * (attention == "eager" and model != "mpt")


def figure_kinds(shares: pd.DataFrame) -> plt.Figure:
    """Draw kinds of operation against models, for every dtype and both passes of a cached step.

    Kinds that never differ are left out.
    """
    columns = shares[["model", "attention"]].drop_duplicates().apply(tuple, axis=1)
    names = _kinds(shares[shares["share"] > 0]) or _kinds(shares)
    passes = {named.LAST_ONE: "last row alone", named.PREFILL: named.PREFILL}
    panels = [(dtype, name) for name in passes for dtype in shares["dtype"].unique()]
    # Many models need the whole width, or their numbers cannot be read on a telephone.
    across = len(passes) if len(columns) <= 4 else 1
    down = len(panels) // across
    fig, axes = style.panels(down, across, 0.8 + (0.35 + 0.26 * len(names)) * down, sharex=True, sharey=True)
    for ax, (dtype, name) in zip(axes.T.flat, panels, strict=True):
        of = shares[(shares["dtype"] == dtype) & (shares["pass"] == name)]
        grid = of.pivot(index="kind", columns=["model", "attention"], values="share")
        grid = grid.reindex(index=names, columns=columns)
        _plot_words(ax, grid, lambda share: "0" if share == 0 else percent(share), 0.8)
        ax.tick_params(axis="y", labelsize=9.5)
        ax.set_xticks(np.arange(len(columns)) + 0.5, [_short(*column) for column in columns], fontsize=9, rotation=0)
        ax.set_title(f"{DTYPES[dtype]}, {passes[name]}", fontsize=9.5, loc="left", pad=2)
    return fig


def _plot_gemm(ax: plt.Axes, states: pd.DataFrame) -> None:
    """Draw the number of rows against K."""
    places = states.assign(place=states["state"].map(named.STATES.index))
    grid = places.pivot(index="inner_size", columns="rows", values="place")
    most = grid.shape[1]
    edges, colours = np.arange(most + 1) + 0.5, ListedColormap([colour for colour, _ in _STATES.values()])
    ax.pcolormesh(edges, np.arange(len(grid) + 1), grid, cmap=colours, vmin=0, vmax=len(_STATES) - 1)
    ax.hlines(np.arange(1, len(grid)), edges[0], edges[-1], color="white", linewidth=1)
    for place, (_, hatch) in enumerate(_STATES.values()):
        if hatch:
            cells = [plt.Rectangle((edges[column], row), 1, 1) for row, column in np.argwhere(grid == place)]
            look = {"facecolor": "none", "edgecolor": _HATCH_COLOUR, "hatch": hatch, "linewidth": 0}
            ax.add_collection(PatchCollection(cells, **look))
    style.name_cells(ax, grid.index)
    ax.set_xscale("log", base=2)
    ticks = [2**power for power in range(most.bit_length())]
    ax.set_xticks(ticks, ticks)
    ax.set_xticks([], minor=True)


def figure_gemm(states: pd.DataFrame) -> plt.Figure:
    """Draw `_plot_gemm` for every dtype and number of threads, one under the other."""
    groups = list(states.groupby(["dtype", "threads"], sort=False))
    height = 0.32 + 0.19 * states["inner_size"].nunique()
    fig, axes = style.panels(len(groups), 1, 1.3 + len(groups) * height, sharex=True)
    for ax, ((dtype, threads), of) in zip(axes[:, 0], groups, strict=True):
        _plot_gemm(ax, of)
        ax.set_title(f"{DTYPES[dtype]}, {threads} thread{'s' * (threads > 1)}", loc="left", fontsize=9.5, pad=2)
    fig.supylabel("K (reduction size)", fontsize=10)
    axes[-1, 0].set_xlabel("query length (rows of the product)")
    handles = [
        Patch(facecolor=colour, edgecolor=_HATCH_COLOUR if hatch else "#444444", hatch=hatch, linewidth=0.5, label=name)
        for name, (colour, hatch) in _STATES.items() if name in set(states["state"])
    ]
    return style.with_legend(fig, handles, 2, "upper left", fontsize=9.5, columnspacing=1, handlelength=1.6)


def figure_lengths(shares: pd.DataFrame) -> plt.Figure:
    """Draw for every length in how many texts bits differ: two strips for each dtype and attention."""
    strips = {
        f"{attention}, {DTYPES[dtype]}: {what}": of.set_index("n_tokens")[what]
        for (attention, dtype), of in shares.groupby(["attention", "dtype"], sort=False) for what in ("logits", "cache")
    }
    grid = pd.DataFrame(strips).T
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.5 + 0.26 * len(grid)))
    mesh, ends = _plot_shares(ax, grid, edgecolors="none"), ax.get_xlim()
    ax.hlines(np.arange(1, len(grid)), *ends, color="white", linewidth=1)
    ax.hlines(np.arange(2, len(grid), 2), *ends, color="#444444", linewidth=0.8)
    apart = 32 if grid.columns[-1] >= 64 else 4
    ax.set_xticks([length for length in grid if length % apart == 0])
    ax.set_xlabel("tokens, the last one scored on a cache")
    _colour_bar(fig, mesh, [ax], "share of texts that differ")
    return fig


def figure_forms(shares: pd.DataFrame) -> plt.Figure:
    """Draw forms of the attention against numbers of keys, for every kernel (down) and dtype (across)."""
    kernels, dtypes = (shares[name].unique() for name in ("kernel", "dtype"))
    fig, axes = style.panels(len(kernels), len(dtypes), 1.6 + 2 * len(kernels), sharex=True, sharey=True)
    for (kernel, dtype), ax in zip(itertools.product(kernels, dtypes), axes.flat, strict=True):
        of = shares[(shares["kernel"] == kernel) & (shares["dtype"] == dtype)]
        grid = of.pivot(index="form", columns="keys", values="share").reindex(named.FORMS)
        # A share that is drawn as none is not none.
        mesh = _plot_words(ax, grid, lambda share: "·" if 0 < share < 0.1 else "", 0.5)
        ax.set_xticks(np.arange(grid.shape[1]) + 0.5, grid.columns, fontsize=9, rotation=90)
        ax.set_title(f"{kernel}, {DTYPES[dtype]}", fontsize=9.5, loc="left", pad=2)
    for ax in axes[-1]:
        ax.set_xlabel("keys")
    _colour_bar(fig, mesh, list(axes.flat), "share of rows that differ from the causal pass")
    return fig


def figure_factorial(table: pd.DataFrame) -> plt.Figure:
    """Draw the drift by who wrote the cache, for every dtype (down) and length (across); a drift of 0 is hollow."""
    dtypes, lengths = (table[name].unique() for name in ("dtype", "n_tokens"))
    fig, axes = style.panels(len(dtypes), len(lengths), 1.1 + 1.25 * len(dtypes), sharey=True, sharex="row")
    for (dtype, length), ax in zip(itertools.product(dtypes, lengths), axes.flat, strict=True):
        for row in table[(table["dtype"] == dtype) & (table["n_tokens"] == length)].itertuples():
            colour, marker, shift = _QUERIES[row.query]
            style.plot_estimate(
                ax, row.drift, named.SOURCES.index(row.cache) + shift, color=colour, marker=marker, markersize=6,
                markerfacecolor=colour if row.drift.value else "white",
            )
        style.name_rows(ax, named.SOURCES, fontsize=9.5)
        ax.set_title(f"{DTYPES[dtype]}, {length} tokens", fontsize=9.5, loc="left", pad=2)
    for ax in axes[:, 0]:
        right = ax.get_xlim()[1]
        ax.set_xlim(-0.04 * right, right)
    fig.supxlabel("relative drift of the logits / unit roundoff", fontsize=10)
    fig.supylabel("keys and values written by", fontsize=10)
    handles = [style.key(f"last token as {of}", colour, marker=marker) for of, (colour, marker, _) in _QUERIES.items()]
    handles.append(style.key("hollow: 0", marker="o", markerfacecolor="white"))
    return style.with_legend(fig, handles, 3, "upper left", fontsize=9.5, columnspacing=1, handletextpad=0.2)
