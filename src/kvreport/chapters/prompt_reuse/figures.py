"""Figures of the chapter on reusing a prompt's cache."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvreport.chapters.prompt_reuse import rows as named
from kvreport.publishing import style, wording
from kvreport.publishing.style import DTYPE_COLOURS
from kvreport.publishing.wording import DTYPES


def figure_first_layer(table: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Draw the share of differing first-layer keys against the query length of the second part, a panel a processor."""
    table = table[table["variant"] == named.POSTED]
    models, processors = (list(dict.fromkeys(table[name])) for name in ("model", "processor"))
    fig, axes = plt.subplots(1, len(processors), sharex=True, sharey=True, squeeze=False, figsize=(style.WIDTH, 3.6))
    for ax, processor in zip(axes[0], processors, strict=True):
        its_own = table[table["processor"] == processor]
        for (model, dtype), rows in its_own.groupby(["model", "dtype"], sort=False):
            rows = rows.sort_values("rows_fed")
            number = models.index(model)
            ax.plot(
                rows["rows_fed"], rows["share"], color=DTYPE_COLOURS[dtype], marker=style.MARKERS[number],
                linestyle=("-", ":")[number % 2],
            )
        for row in published.itertuples():
            ax.plot(
                row.rows_fed, row.share, color=style.GREY, marker=style.MARKERS[models.index(row.model)],
                markerfacecolor="white", linestyle="", markersize=7,
            )
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.set(xlabel="tokens fed in the second part", ylim=(-0.03, 1.03))
        ax.set_title(wording.processor(processor), fontsize=10, loc="left")
    axes[0, 0].set_ylabel("share of keys that differ")
    handles = [Line2D([], [], color=DTYPE_COLOURS[d], label=DTYPES[d]) for d in dict.fromkeys(table["dtype"])]
    handles += [
        Line2D([], [], color=style.GREY, marker=style.MARKERS[i], linestyle=("-", ":")[i % 2], label=model)
        for i, model in enumerate(models)
    ]
    handles.append(
        Line2D([], [], color=style.GREY, marker="o", markerfacecolor="white", linestyle="", label="published")
    )
    fig.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9)
    return fig


def figure_layers(curves: pd.DataFrame) -> Figure:
    """Draw share and size of the difference against the layer, one column a model, from `tables.by_layer`."""
    models = list(dict.fromkeys(curves["model"]))
    fig, axes = plt.subplots(2, len(models), sharex="col", sharey="row", squeeze=False, figsize=(style.WIDTH, 4.6))
    # Keys and values go together; the mean of the two keeps the panels readable, the data file has both.
    means = curves.groupby(["model", "dtype", "part", "layer"], sort=False)[["share", "relative_roundoffs"]].mean()
    for column, model in enumerate(models):
        for (dtype, part), rows in means.loc[model].groupby(["dtype", "part"], sort=False):
            rows = rows.reset_index().sort_values("layer")
            response = part == "response"
            look = {
                "color": DTYPE_COLOURS[dtype], "linestyle": "-" if response else ":", "linewidth": 1.2,
                "marker": "o" if response else "s", "markersize": 3.5,
            }
            axes[0, column].plot(rows["layer"], rows["share"], **look)
            positive = rows[rows["relative_roundoffs"] > 0]
            axes[1, column].plot(positive["layer"], positive["relative_roundoffs"], **look)
        axes[0, column].text(
            0.03, 0.97, model, transform=axes[0, column].transAxes, va="top", fontsize=10, fontweight="bold"
        )
        axes[1, column].set(xlabel="layer", yscale="log")
        axes[1, column].xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set(ylabel="share that differs", ylim=(-0.03, 1.15))
    axes[1, 0].set_ylabel("relative difference\n/ unit roundoff")
    handles = [Line2D([], [], color=DTYPE_COLOURS[d], label=DTYPES[d]) for d in dict.fromkeys(curves["dtype"])]
    handles += [
        Line2D([], [], color=style.GREY, marker="o", markersize=3.5, label="response"),
        Line2D([], [], color=style.GREY, marker="s", markersize=3.5, linestyle=":", label="prompt"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=9)
    return fig


_WAYS = {named.AS_IS: (style.VERMILION, "s"), named.SHARED: (style.BLUE, "o")}


def figure_outcomes(table: pd.DataFrame, book: pd.DataFrame | None = None) -> Figure:
    """Draw the share of runs with equal tokens for every case and dtype; the published shares faint behind."""
    labels = list(dict.fromkeys(table["case"] + ", " + table["dtype"]))
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.2 + 0.4 * len(labels)))

    def place(row) -> float:
        return labels.index(f"{row.case}, {row.dtype}") + (-0.16 if row.way == named.AS_IS else 0.16)

    for row in table.itertuples():
        colour, marker = _WAYS[row.way]
        estimate = row.estimate
        ax.errorbar(
            estimate.value, place(row), xerr=[[estimate.value - estimate.low], [estimate.high - estimate.value]],
            fmt=marker, color=colour,
        )
        ax.annotate(
            f"{row.equal}/{row.runs}", (1.04, place(row)), va="center", fontsize=8, color=colour, annotation_clip=False
        )
    if book is not None:
        for row in book[(book["case"] + ", " + book["dtype"]).isin(labels)].itertuples():
            ax.plot(
                [row.estimate.low, row.estimate.high], [place(row)] * 2, color=_WAYS[row.way][0], alpha=0.3,
                linewidth=7, linestyle="-", solid_capstyle="butt",
            )
    ax.set_yticks(range(len(labels)), labels, fontsize=9)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set(xlabel="share of runs with equal tokens", xlim=(-0.03, 1.03))
    ax.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", label=way) for way, (colour, marker) in _WAYS.items()
    ]
    if book is not None:
        handles.append(Line2D([], [], color=style.GREY, alpha=0.3, linewidth=7, linestyle="-", label="the book"))
    fig.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=9)
    return fig


def figure_cuts(table: pd.DataFrame) -> Figure:
    """Draw the share of unsafe cuts by place, one marker a vocabulary, from `tables.cut_shares`."""
    places, names = list(dict.fromkeys(table["place"])), list(dict.fromkeys(table["tokenizer"]))
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.2 + 0.4 * len(places)))
    for row in table.itertuples():
        number = names.index(row.tokenizer)
        estimate = row.estimate
        ax.errorbar(
            estimate.value, places.index(row.place) + 0.28 * ((number + 0.5) / len(names) - 0.5) * 2,
            xerr=[[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]],
            fmt=style.MARKERS[number % len(style.MARKERS)], color=style.PALETTE[number % len(style.PALETTE)],
        )
    ax.set_yticks(range(len(places)), places)
    ax.set_ylim(len(places) - 0.4, -0.6)
    ax.set(xlabel="share of cuts that change the ids", xlim=(-0.03, 1.03))
    ax.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=style.PALETTE[i % 5], marker=style.MARKERS[i % 5], linestyle="", label=name)
        for i, name in enumerate(names)
    ]
    fig.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=9)
    return fig
