"""Figures of the chapter on exact caches. Colour is the dtype; filled is under the switch, hollow is stock."""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvreport.chapters.exact_caches import paths
from kvreport.publishing import style
from kvreport.publishing.style import DTYPE_COLOURS
from kvreport.publishing.wording import DTYPES


def figure_ways(shares: pd.DataFrame) -> Figure:
    """Draw the share of equal rows for every way, dtype and model."""
    dtypes, ways = (list(dict.fromkeys(shares[name])) for name in ("dtype", "way"))
    models = list(dict.fromkeys(shares["model"]))
    fig, axes = plt.subplots(
        len(dtypes), 1, sharex=True, squeeze=False, figsize=(style.WIDTH, 1.3 + 1.25 * len(dtypes))
    )
    shift = {model: (index + 1) / (len(models) + 1) - 0.5 for index, model in enumerate(models)}
    for ax, dtype in zip(axes[:, 0], dtypes, strict=True):
        for row in shares[shares["dtype"] == dtype].itertuples():
            stock = row.arithmetic == paths.STOCK
            ax.plot(
                ways.index(row.way) + 0.8 * shift[row.model], row.share, linestyle="", markersize=6 if stock else 3.5,
                marker=style.MARKERS[models.index(row.model) % len(style.MARKERS)], color=DTYPE_COLOURS[dtype],
                markerfacecolor="white" if stock else DTYPE_COLOURS[dtype], zorder=2 if stock else 3,
            )  # fmt: skip
        ax.set(ylim=(-0.12, 1.12), yticks=[0, 0.5, 1])
        ax.set_ylabel(DTYPES[dtype], color=DTYPE_COLOURS[dtype])
        for edge in np.arange(0.5, len(ways) - 1):
            ax.axvline(edge, color="#dddddd", linewidth=0.8)
        ax.grid(axis="x", visible=False)
    fig.supylabel("share of equal rows", fontsize=10)
    axes[-1, 0].set_xticks(range(len(ways)), [textwrap.fill(way, 9) for way in ways], fontsize=8)
    handles = [
        Line2D([], [], color=style.GREY, marker=style.MARKERS[i % len(style.MARKERS)], linestyle="", label=model)
        for i, model in enumerate(models)
    ]
    handles += [
        Line2D(
            [], [], color=style.GREY, marker="o", linestyle="", markerfacecolor="white", markersize=6, label="stock"
        ),
        Line2D([], [], color=style.GREY, marker="o", linestyle="", markersize=3.5, label="switch on"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8.5)
    return fig


def figure_ladder(table: pd.DataFrame) -> Figure:
    """Draw share of equal rows and error for every rung."""
    rungs, dtypes = (list(dict.fromkeys(table[name])) for name in ("rung", "dtype"))
    fig, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(style.WIDTH, 3.4))
    for index, (dtype, rows) in enumerate(table.groupby("dtype", sort=False)):
        place = rows["rung"].map(rungs.index) + 0.18 * (index - (len(dtypes) - 1) / 2)
        drawn = {"color": DTYPE_COLOURS[dtype], "marker": style.MARKERS[index], "linestyle": "", "markersize": 5}
        left.plot(rows["share"], place, **drawn)
        right.plot(rows["error"], place, label=DTYPES[dtype], **drawn)
    left.set(xlabel="share of equal rows", xlim=(-0.07, 1.07))
    left.set_yticks(range(len(rungs)), rungs)
    left.invert_yaxis()
    right.set(xscale="log", xlabel="relative error")
    fig.legend(loc="outside upper center", ncols=3)
    return fig
