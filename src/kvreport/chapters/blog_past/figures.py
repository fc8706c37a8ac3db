"""Figures of the chapter on the blog post about past_key_values."""

import matplotlib.pyplot as plt
import pandas as pd

from kvreport.chapters.blog_past.rows import DECODER, HANDED, NO_PAST
from kvreport.publishing import style

_QUANTIZATIONS = {
    "none": ("weights in the dtype", style.BLUE, "o"), "8bit": ("8 bits", style.GREEN, "s"),
    "4bit": ("4 bits", style.VERMILION, "^"),
}


def figure_variants(table: pd.DataFrame, book: pd.DataFrame | None = None) -> plt.Figure:
    """Draw the difference of every variant, one line each; a published table stands faint behind it."""
    shown = _whole(table)
    labels = list(dict.fromkeys(zip(shown["model"], shown["variant"], strict=True)))
    fig, ax = style.rows([f"{model.rpartition('/')[2]}: {variant}" for model, variant in labels], 1.2, 0.36, fontsize=9)
    for rows, look in ((_whole(table[:0] if book is None else book), style.FAINT), (shown, {})):
        for row in rows.itertuples():
            label = row.model, row.variant
            # The book may have models that this run lacks.
            if label in labels and row.spread.value > 0:
                _, colour, marker = _QUANTIZATIONS[row.quantization]
                place = labels.index(label) + (list(_QUANTIZATIONS).index(row.quantization) - 1) * 0.2
                style.plot_estimate(ax, row.spread, place, down_to=0.01, color=colour, marker=marker, **look)
    ax.set(xscale="log", xlabel="difference / spread of the logits")
    handles = [
        style.key(label, colour, marker=marker)
        for key, (label, colour, marker) in _QUANTIZATIONS.items() if key in set(shown["quantization"])
    ]
    if book is not None:
        handles.append(style.key("the book", marker="o", **style.FAINT))
    return style.with_legend(fig, handles, 4, "upper right")


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out models that were cut to their first layers: their depths have a figure of their own."""
    deepest = table.groupby(["model", "variant"])["layers"].transform("max")
    return table[(table["variant"] != HANDED) | (table["layers"] == deepest)]


def figure_depth(table: pd.DataFrame) -> plt.Figure:
    """Draw what a past handed to the bidirectional model changes, against the number of its layers."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.2))
    rows = table[table["variant"] == HANDED].sort_values("layers")
    values, look = [one.value for one in rows["spread"]], {"color": style.BLUE, "label": "a past handed over"}
    ax.errorbar(rows["layers"], values, yerr=style.ends(rows["spread"]), fmt="o-", **look)
    for variant, colour, line in ((NO_PAST, style.VERMILION, "--"), (DECODER, style.GREEN, ":")):
        for row in table[table["variant"] == variant].itertuples():
            ax.axhline(row.spread.value, color=colour, linestyle=line, label=variant)
    ax.set(xlabel="layers", ylabel="difference / spread of the logits", yscale="log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=9)
    return fig


def figure_published(beside: pd.DataFrame) -> plt.Figure:
    """Draw the post's absolute differences beside ours, a panel a case."""
    cases = list(dict.fromkeys(beside["case"]))
    fig, axes = style.panels(2, (len(cases) + 1) // 2, 4.6, sharey=True)
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
    for ax in axes.flat[len(cases) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("absolute difference")
    handles = [style.key("published", marker="o", markerfacecolor="white"), style.key("ours", style.BLUE, marker="o")]
    return style.with_legend(fig, handles, 2, "upper right")
