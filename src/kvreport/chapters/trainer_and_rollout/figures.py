"""Figures of the chapter on trainer and rollout."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.publishing import style

_LINES = ("-", "--", "-.", ":", (0, (1, 3)))


def figure_ways(table: pd.DataFrame) -> Figure:
    """Draw how far both sides are apart in every way; beside each, the share of tokens outside [0.9, 1.1]."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.1 + 0.3 * len(table)))
    for place, row in enumerate(table.itertuples()):
        share = f"{row.outside.value:.1%}"
        if row.mean_abs.value > 0:
            style.plot_estimate(ax, row.mean_abs, place, marker="o", color=style.BLUE, markersize=5)
        else:
            share = "0, bitwise"
        ax.annotate(share, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    ax.annotate("outside\n[0.9, 1.1]", (1.02, -0.9), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    ax.set(xscale="log", xlabel="mean |Δ log p| (nats per token)")
    style.name_rows(ax, list(table["compared"]), fontsize=9)
    ax.grid(axis="y", visible=False)
    return fig


def figure_sequences(table: pd.DataFrame) -> Figure:
    """Draw the effective sample size by length: seen, truncated, and expected of independent tokens."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.2))
    looks = {named.BF16: (style.VERMILION, "s"), named.FULL: (style.BLUE, "o")}
    handles = []
    for compared, rows in table.groupby("compared", sort=False):
        colour, marker = looks[compared]
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
    fig.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=9)
    return fig


def figure_learning(table: pd.DataFrame) -> Figure:
    """Draw the reward by update, an arm a line, with the range over repetitions of the first."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.4))
    for (arm, rows), line, colour in zip(table.groupby("arm", sort=False), _LINES, style.PALETTE, strict=False):
        ax.plot(rows["update"], rows["mean"], color=colour, linestyle=line, label=arm)
        if arm in (named.MATCHED, named.FAULTY):
            ax.fill_between(rows["update"], rows["min"], rows["max"], color=colour, alpha=0.12, linewidth=0)
    ax.set(xlabel="update", ylabel="reward")
    fig.legend(loc="outside upper center", ncols=1, fontsize=9)
    return fig
