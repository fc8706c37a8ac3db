"""Figures of the chapter on trainer and rollout."""

import matplotlib.pyplot as plt
import pandas as pd

from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.publishing import style
from kvreport.publishing.wording import between


def figure_mismatch(table: pd.DataFrame) -> plt.Figure:
    """Draw how far trainer and rollout are apart, a row a comparison and a marker a population of texts."""
    names, texts = list(dict.fromkeys(table["compared"])), list(dict.fromkeys(table["texts"]))
    fig, ax = style.rows(names, 1.2, 0.34, fontsize=9)
    for row in table.itertuples():
        which = texts.index(row.texts)
        place = names.index(row.compared) + 0.22 * (which - (len(texts) - 1) / 2)
        look = {"marker": style.MARKERS[which], "color": style.PALETTE[which], "markersize": 5}
        style.plot_estimate(ax, row.mean_abs, place, **look)
    for place, name in enumerate(names):
        shares = between((100 * one.value for one in table.loc[table["compared"] == name, "outside"]), "{:.0f}")
        ax.annotate(f"{shares} %", (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    ax.annotate("outside\n[0.9, 1.1]", (1.02, 1.01), xycoords="axes fraction", va="bottom", fontsize=9)
    # Rounding above, mistakes below.
    ax.axhline(sum(name in named.ROUNDING for name in names) - 0.5, color="#bbbbbb", linewidth=0.8)
    ax.set(xscale="log", xlabel="mean |Δ log p| (nats per token)")
    looks = zip(texts, style.PALETTE, style.MARKERS, strict=False)
    handles = [style.key(name, colour, marker=marker) for name, colour, marker in looks]
    return style.with_legend(fig, handles, len(handles))


def figure_ways(table: pd.DataFrame) -> plt.Figure:
    """Draw how far both sides are apart in every way; beside each, the share of tokens outside [0.9, 1.1]."""
    fig, ax = style.rows(list(table["compared"]), 1.1, 0.3, fontsize=9)
    for place, row in enumerate(table.itertuples()):
        share = f"{row.outside.value:.1%}"
        if row.mean_abs.value > 0:
            style.plot_estimate(ax, row.mean_abs, place, marker="o", color=style.BLUE, markersize=5)
        else:
            share = "0, bitwise"
        ax.annotate(share, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    ax.annotate("outside\n[0.9, 1.1]", (1.02, -0.9), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    ax.set(xscale="log", xlabel="mean |Δ log p| (nats per token)")
    return fig


def figure_sequences(table: pd.DataFrame) -> plt.Figure:
    """Draw the effective sample size by length: seen, truncated, and expected of independent tokens."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.2))
    looks = {named.FULL: (style.BLUE, "o"), named.HEAD: (style.GREEN, "^")}
    handles = []
    for compared, rows in table.groupby("compared", sort=False):
        colour, marker = looks.get(compared, (style.VERMILION, "s"))
        rows = rows.sort_values("length")
        ax.plot(rows["length"], rows["effective"], color=colour, marker=marker, markersize=5)
        ax.plot(rows["length"], rows["expected"], color=colour, linestyle=":", linewidth=1.2)
        ax.plot(rows["length"], rows["truncated"], color=colour, marker=marker, markersize=5, linestyle="--",
            markerfacecolor="white")
        handles.append(style.key(compared, colour, marker=marker))
    handles += [
        style.key("as they are", linestyle="-"), style.key(f"truncated at {named.CAP}", linestyle="--"),
        style.key("if tokens were independent", linestyle=":"),
    ]
    ax.set(xscale="log", xlabel="tokens of the sequence", ylabel="effective sample size (share)", ylim=(0, 1.05))
    ax.set_xticks(sorted(table["length"].unique()), sorted(table["length"].unique()))
    ax.minorticks_off()
    return style.with_legend(fig, handles, 2)
