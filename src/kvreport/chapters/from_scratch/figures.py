"""Figures of the chapter on the thread about a model from scratch.

A way keeps its colour and its marker through all figures.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvreport.chapters.from_scratch import tables
from kvreport.chapters.from_scratch.gpt.paths import POSTED, WINDOW, refill_name
from kvreport.chapters.from_scratch.speed import ALL_ROWS, REPLYS_MODEL, TRAINED
from kvreport.publishing import style
from kvreport.publishing.style import plot_estimates
from kvreport.publishing.wording import DTYPES

# The figure of costs is linear up to here on either side of 0.
LINEAR_NATS = 0.02
REFILL = "refill"
LOOKS = {
    WINDOW: (style.BLACK, "o"),
    tables.ABSOLUTE: (style.GREEN, "^"),
    POSTED: (style.VERMILION, "s"),
    tables.REPLY: (style.PURPLE, "v"),
    tables.FORGOTTEN: (style.GREY, "D"),
    REFILL: (style.BLUE, "D"),
}


def _look(way: str) -> tuple[str, str]:
    return LOOKS[REFILL if way.startswith(REFILL) else way]


def plot_steps(logits: pd.DataFrame, ax: Axes) -> Axes:
    """Draw the largest difference of the logits at each step, of every way that ought to agree with its reference."""
    block = int(logits["block"].iloc[0])
    # Where lines lie on one another, the lower ones are wider.
    ways = (tables.FORGOTTEN, POSTED, tables.REPLY, refill_name(max(1, block // 2)))
    for way, width in zip(ways, (1.0, 4.0, 2.5, 1.0), strict=True):
        rows = logits[(logits["comparison"] == way) & (logits["max_abs"] > 0)]
        colour, marker = _look(way)
        ax.plot(
            rows["length"], rows["max_abs"], color=colour, marker=marker, markersize=3 + width / 2, linestyle="-",
            linewidth=width, markevery=max(1, block // 4), label=way,
        )
    ax.axvline(block, color=style.GREY, linewidth=1, linestyle=":")
    ax.set(yscale="log", xlabel="characters read", ylabel="largest difference of the logits")
    return ax


def figure_steps(logits: pd.DataFrame) -> Figure:
    """Draw `plot_steps` for each dtype, side by side on one axis of values."""
    groups = list(logits.groupby("dtype", sort=False))
    fig, axes = plt.subplots(1, len(groups), sharey=True, squeeze=False, figsize=(style.WIDTH, 3.8))
    for ax, (dtype, rows) in zip(axes[0], groups, strict=True):
        plot_steps(rows, ax)
        ax.set_title(DTYPES[dtype], loc="left", fontsize=10)
        ax.label_outer()
    handles, labels = axes[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=9)
    return fig


def _positions(buckets: pd.DataFrame) -> tuple[dict[int, int], list[str]]:
    ends = list(dict.fromkeys(buckets["read_to"]))
    begins = list(dict.fromkeys(buckets["read_from"]))
    return {end: place for place, end in enumerate(ends)}, [f"{b + 1}–{e}" for b, e in zip(begins, ends, strict=True)]


def plot_buckets(buckets: pd.DataFrame, value: str, ways: tuple[str, ...], ax: Axes) -> Axes:
    """Draw the loss of ways, or their gap to the window, by how much was read."""
    place, labels = _positions(buckets)
    for number, way in enumerate(ways):
        rows = buckets[buckets["way"] == way]
        shift = 0.12 * (number - (len(ways) - 1) / 2)
        estimates = list(rows[value])
        values = np.array([e.value for e in estimates])
        ends = np.array([[e.value - e.low, e.high - e.value] for e in estimates]).T
        colour, marker = _look(way)
        x = rows["read_to"].map(place) + shift
        ax.errorbar(
            x, values, yerr=ends, color=colour, marker=marker, markersize=4, linewidth=1, linestyle="-", label=way
        )
    ax.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=9)
    behind = buckets.loc[buckets["read_from"] >= buckets["block"], "read_to"].min()
    if not np.isnan(behind):
        ax.axvline(place[behind] - 0.5, color=style.GREY, linewidth=1, linestyle=":")
    ax.set_xlabel("characters read")
    return ax


def figure_loss(buckets: pd.DataFrame) -> Figure:
    """Draw every way's loss on the left, and on the right the gap to the window of those that lie close."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.WIDTH, 4.1))
    half = refill_name(max(1, int(buckets["block"].iloc[0]) // 2))
    plot_buckets(buckets, "nats", (WINDOW, POSTED, tables.REPLY, tables.FORGOTTEN), left)
    left.set_ylabel("loss (nats a character)")
    plot_buckets(buckets, "gap", (tables.ABSOLUTE, POSTED, half), right)
    right.axhline(0, color=style.BLACK, linewidth=1)
    right.set_ylabel("loss minus the window's")
    found = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    found |= dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    fig.legend(found.values(), found.keys(), loc="outside upper center", ncols=2, fontsize=9)
    return fig


def figure_causes(causes: pd.DataFrame) -> Figure:
    """Draw the gap past the block under each change of the posted cache."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 0.9 + 0.38 * len(causes)))
    plot_estimates(causes, ax, reference=0.0, form="{:+.3f}")
    ax.margins(x=0.09)
    ax.set_xlabel("loss minus the window's (nats)")
    return fig


def figure_sizes(sizes: pd.DataFrame) -> Figure:
    """Draw the gap past the block under each change, a marker for each of two sizes of model."""
    labels, names = list(dict.fromkeys(sizes["label"])), list(dict.fromkeys(sizes["size"]))
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.3 + 0.42 * len(labels)))
    looks = ((style.GREY, "o", "white"), (style.VERMILION, "s", style.VERMILION))
    for number, (name, (colour, marker, face)) in enumerate(zip(names, looks, strict=True)):
        rows = sizes[sizes["size"] == name]
        ends = np.array([[e.value - e.low, e.high - e.value] for e in rows["estimate"]]).T
        ax.errorbar(
            [e.value for e in rows["estimate"]], [labels.index(label) + 0.22 * (2 * number - 1)
                for label in rows["label"]],
            xerr=ends, color=colour, marker=marker, markerfacecolor=face, markersize=5, linestyle="", label=name,
        )
    ax.axvline(0, color=style.GREY, linewidth=1, linestyle=":")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("loss minus the window's (nats)")
    fig.legend(loc="outside upper center", ncols=2, fontsize=9)
    return fig


def figure_speed(speeds: pd.DataFrame) -> Figure:
    """Draw how many times as long a step takes without a cache, by length, with the reply's factor marked."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.6))
    for model, colour in ((TRAINED, style.BLUE), (REPLYS_MODEL, style.VERMILION)):
        for way, line, marker in ((WINDOW, "--", "o"), (ALL_ROWS, "-", "s")):
            rows = speeds[(speeds["model"] == model) & (speeds["way"] == way)]
            values = np.array([e.value for e in rows["ratio"]])
            ends = np.array([[e.value - e.low, e.high - e.value] for e in rows["ratio"]]).T
            ax.errorbar(
                rows["length"], values, yerr=ends, color=colour, linestyle=line, marker=marker, linewidth=1.2,
                markerfacecolor="white" if line == "--" else colour,
            )
    ax.axhline(3, color=style.GREY, linewidth=1, linestyle=":")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    style.plain_logarithm(ax.yaxis)
    ax.annotate("3, as published", (0, 3), xycoords=("axes fraction", "data"), xytext=(2, 3),
                textcoords="offset points", fontsize=9, color=style.GREY)
    ax.set(xlabel="length of the text at the step", ylabel="time without cache / with")
    handles = [
        Line2D([], [], color=style.BLUE, linewidth=3, label="trained model"),
        Line2D([], [], color=style.VERMILION, linewidth=3, label="reply's size"),
        Line2D([], [], color=style.GREY, linestyle="-", marker="s", label="all rows of logits"),
        Line2D(
            [], [], color=style.GREY, linestyle="--", marker="o", markerfacecolor="white", label="one row of logits"
        ),
    ]
    fig.legend(handles=handles, fontsize=9, loc="outside upper center", ncols=2)
    return fig


def figure_cost(costs: pd.DataFrame) -> Figure:
    """Draw what each way loses past the block against what it costs there."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.0))
    refills = costs[costs["way"].str.startswith(REFILL)]
    ax.plot(
        [e.value for e in refills["time_ratio"]], [e.value for e in refills["gap"]], color=_look(REFILL)[0],
        linewidth=1, linestyle="-",
    )
    hops = iter(("o", "s", "^", "D"))
    for row in costs.itertuples():
        time, gap = row.time_ratio, row.gap
        colour, marker = _look(row.way)
        ax.errorbar(
            time.value, gap.value, xerr=[[time.value - time.low], [time.high - time.value]],
            yerr=[[gap.value - gap.low], [gap.high - gap.value]], color=colour, linewidth=1, markersize=6,
            fmt=next(hops) if row.way.startswith(REFILL) else marker, label=f"{row.way} ({gap.value:+.3f})",
                linestyle="",
        )
    ax.axhline(0, color=style.BLACK, linewidth=1)
    # What is lost spans two orders, and zero is the place to be.
    ax.set_yscale("symlog", linthresh=LINEAR_NATS)
    positive = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    ax.set_yticks([-value for value in positive] + [-0.01, 0, 0.01] + positive)
    ax.set_ylim(min(-0.02, 1.4 * min(e.low for e in costs["gap"])), max(e.high for e in costs["gap"]) * 1.3)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(plt.LogLocator(subs=(0.8, 1, 1.5, 2, 3, 4, 5, 6)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    ax.set(
        xlabel="time past the block / the posted cache's",
        ylabel=f"loss minus the window's (nats)\nlinear within ±{LINEAR_NATS}",
    )
    fig.legend(loc="outside upper center", ncols=2, fontsize=9)
    return fig
