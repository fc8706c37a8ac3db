"""Figures of the chapter on the blog post about past_key_values."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvreport.chapters.blog_past.rows import DECODER, HANDED, NO_PAST
from kvreport.publishing import style

_QUANTIZATIONS = {
    "none": ("weights in the dtype", style.BLUE, "o"),
    "8bit": ("8 bits", style.GREEN, "s"),
    "4bit": ("4 bits", style.VERMILION, "^"),
}


def figure_variants(table: pd.DataFrame, book: pd.DataFrame | None = None) -> Figure:
    """Draw the difference of every variant, one line each; a published table stands faint behind it."""
    shown = _whole(table)
    labels = list(dict.fromkeys(shown["model"] + ": " + shown["variant"]))
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.2 + 0.36 * len(labels)))
    for rows, faint in ((_whole(table[:0] if book is None else book), True), (shown, False)):
        for row in rows.itertuples():
            place = f"{row.model}: {row.variant}"
            # The book may have models that this run lacks.
            if place not in labels:
                continue
            _, colour, marker = _QUANTIZATIONS[row.quantization]
            y = labels.index(place) + (list(_QUANTIZATIONS).index(row.quantization) - 1) * 0.2
            estimate = row.spread
            if estimate.value > 0:
                low = max(estimate.low, estimate.value / 100)
                look = {"linewidth": 6, "alpha": 0.3, "markersize": 11} if faint else {}
                ax.errorbar(
                    estimate.value, y, xerr=[[estimate.value - low], [estimate.high - estimate.value]], fmt=marker,
                    color=colour, **look,
                )
    ax.set_yticks(range(len(labels)), labels, fontsize=9)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set(xscale="log", xlabel="difference / spread of the logits")
    ax.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", label=label)
        for key, (label, colour, marker) in _QUANTIZATIONS.items()
        if key in set(shown["quantization"])
    ]
    if book is not None:
        handles.append(
            Line2D([], [], color=style.GREY, marker="o", markersize=11, alpha=0.3, linestyle="", label="the book")
        )
    fig.legend(handles=handles, loc="outside upper right", ncols=4, fontsize=9)
    return fig


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out models that were cut to their first layers: their depths have a figure of their own."""
    deepest = table.groupby(["model", "variant"])["layers"].transform("max")
    return table[(table["variant"] != HANDED) | (table["layers"] == deepest)]


def figure_depth(table: pd.DataFrame) -> Figure:
    """Draw what a past handed to the bidirectional model changes, against the number of its layers."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.2))
    rows = table[table["variant"] == HANDED].sort_values("layers")
    spread = rows["spread"]
    ax.errorbar(
        rows["layers"], [e.value for e in spread],
        yerr=[[e.value - e.low for e in spread], [e.high - e.value for e in spread]],
        fmt="o-", color=style.BLUE, label="a past handed over",
    )
    for variant, colour, line in ((NO_PAST, style.VERMILION, "--"), (DECODER, style.GREEN, ":")):
        for row in table[table["variant"] == variant].itertuples():
            ax.axhline(row.spread.value, color=colour, linestyle=line, label=variant)
    ax.set(xlabel="layers", ylabel="difference / spread of the logits", yscale="log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=9)
    return fig


def figure_published(beside: pd.DataFrame) -> Figure:
    """Draw the post's absolute differences beside ours, a panel a case."""
    cases = list(dict.fromkeys(beside["case"]))
    fig, axes = plt.subplots(2, (len(cases) + 1) // 2, sharey=True, squeeze=False, figsize=(style.WIDTH, 4.6))
    for ax, case in zip(axes.flat, cases, strict=False):
        rows = beside[beside["case"] == case].reset_index(drop=True)
        for column, colour, face in (
            ("published absolute", style.GREY, "white"), ("here absolute", style.BLUE, style.BLUE)
        ):
            values = pd.to_numeric(rows[column])
            ax.plot(rows.index[values > 0], values[values > 0], "o", color=colour, markerfacecolor=face)
        ax.set_xticks(rows.index, rows["statistic"], rotation=90, fontsize=8)
        ax.set_yscale("log")
        ax.set_title(case, fontsize=9)
    for ax in list(axes.flat)[len(cases) :]:
        ax.set_visible(False)
    for row in axes:
        row[0].set_ylabel("absolute difference")
    handles = [
        Line2D([], [], color=style.GREY, marker="o", markerfacecolor="white", linestyle="", label="published"),
        Line2D([], [], color=style.BLUE, marker="o", linestyle="", label="ours"),
    ]
    fig.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=9)
    return fig
