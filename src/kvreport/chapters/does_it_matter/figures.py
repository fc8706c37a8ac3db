"""Figures of the chapter on whether the difference matters. Colour is the dtype; hollow grey is what others published."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbook.measuring.survival import Survival
from kvreport.chapters.does_it_matter import drift_by_position, first_divergence, tables, variants
from kvreport.publishing import style
from kvreport.publishing.style import DTYPE_COLOURS
from kvreport.publishing.wording import DTYPES

_DTYPE_MARKERS = dict(zip(DTYPE_COLOURS, style.MARKERS, strict=False))
# Of the ways in the curves: the line says which, the colour says in which dtype.
_LINES = ("-", "--", "-.", ":")


def figure_axes(axes: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Draw the mean divergence of every way, in every dtype, above what others published."""
    ways, dtypes = (list(dict.fromkeys(axes[name])) for name in ("way", "dtype"))
    labels = [*ways, *published["what"]]
    fig, ax = plt.subplots(figsize=(style.WIDTH, 0.9 + 0.3 * len(labels)))
    values = np.array([estimate.value for estimate in axes["kl"]])
    # A logarithmic axis has no zero: what is zero stands at its left edge, and says so.
    edge = 10.0 ** np.floor(np.log10(values[values > 0].min()) - 1.5) if (values > 0).any() else 1e-16
    for row in axes.itertuples():
        shift = 0.26 * (dtypes.index(row.dtype) - (len(dtypes) - 1) / 2)
        place = ways.index(row.way) + shift
        drawn = {"color": DTYPE_COLOURS[row.dtype], "marker": _DTYPE_MARKERS[row.dtype], "markersize": 5}
        if row.kl.value == 0:
            ax.plot(edge, place, markerfacecolor="white", **drawn)
            continue
        low = max(row.kl.low, edge)
        ax.errorbar(row.kl.value, place, xerr=[[row.kl.value - low], [row.kl.high - row.kl.value]], **drawn)
    for index, value in enumerate(published["mean_kl_nats"]):
        ax.plot(value, len(ways) + index, marker="D", color=style.GREY, markerfacecolor="white", markersize=5)
        ax.axvline(value, color=style.GREY, linewidth=0.6, linestyle=":")
    ax.axhline(len(ways) - 0.5, color=style.GREY, linewidth=0.8)
    kinds = [variants.BY_NAME[way].kind for way in ways]
    for index in range(1, len(ways)):
        if kinds[index] != kinds[index - 1]:
            ax.axhline(index - 0.5, color="#bbbbbb", linewidth=0.8)
    ax.set_yticks(range(len(labels)), labels, fontsize=8.5)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.set(xscale="log", xlabel="mean divergence (nats a token)", xlim=(edge / 3, None))
    ax.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=DTYPE_COLOURS[d], marker=_DTYPE_MARKERS[d], linestyle="", label=DTYPES[d]) for d in dtypes
    ]
    handles += [
        Line2D([], [], color=style.GREY, marker="o", markerfacecolor="white", linestyle="", label="exactly 0"),
        Line2D([], [], color=style.GREY, marker="D", markerfacecolor="white", linestyle="", label="llama.cpp, 8B"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=9)
    return fig


def figure_margins(margins: pd.DataFrame) -> Figure:
    """Draw how large margins are, and how likely a first choice is lost at each."""
    fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(style.WIDTH, 4.8), height_ratios=[2, 3])
    for dtype, rows in margins.groupby("dtype", sort=False):
        colour, marker = DTYPE_COLOURS[dtype], _DTYPE_MARKERS[dtype]
        # The first bin goes down to 0, which a logarithmic axis puts infinitely far away.
        left = rows["low"].where(rows["low"] > 0, 0.5)
        top.stairs(rows["share_of_margins"], [*left, rows["high"].iloc[-1]], color=colour, fill=True, alpha=0.35)
        top.stairs(rows["share_of_margins"], [*left, rows["high"].iloc[-1]], color=colour)
        middle = np.sqrt(left * rows["high"])
        bottom.plot(middle, rows["predicted"], color=colour, linestyle="--", linewidth=1.2)
        seen = rows[rows["tokens"] >= tables.FEWEST]
        for row, at in zip(seen.itertuples(), middle[seen.index], strict=True):
            bottom.errorbar(
                at, row.seen.value, yerr=[[row.seen.value - row.seen.low], [row.seen.high - row.seen.value]],
                color=colour, marker=marker, markersize=4, linewidth=1,
            )  # fmt: skip
    top.set_ylabel("share of\nmargins")
    bottom.set(xscale="log", xlabel="margin of the first choice (ulps of the largest logit)")
    bottom.set_ylabel("first choices lost")
    bottom.set_ylim(-0.02, None)
    handles = [
        Line2D([], [], color=DTYPE_COLOURS[d], marker=_DTYPE_MARKERS[d], label=DTYPES[d], linestyle="")
        for d in dict.fromkeys(margins["dtype"])
    ]
    handles += [
        Line2D([], [], color=style.GREY, marker="o", linestyle="", label="seen"),
        Line2D([], [], color=style.GREY, linestyle="--", label="from the shifts alone"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=9)
    return fig


# Which curves are drawn: enough to compare, few enough to tell apart.
DRAWN_WAYS = (first_divergence.WRITER, variants.KV_INT8.name, variants.KV_INT4.name, variants.WEIGHTS_4.name)


def _plot_curve(ax: Axes, curve: Survival, steps: int, band: bool, **how) -> None:
    x, share = np.append(curve.steps, steps), np.append(curve.share, curve.share[-1])
    ax.step(x, share, where="post", **how)
    if band:
        low, high = (np.append(end, end[-1]) for end in (curve.low, curve.high))
        ax.fill_between(x, low, high, step="post", color=how["color"], alpha=0.15, linewidth=0)


def figure_partings(curves: dict[tuple[str, str, str], Survival], table: pd.DataFrame, steps: int) -> Figure:
    """Draw for both choices the share of texts that are still the baseline's, seen and expected."""
    choices = list(dict.fromkeys(choice for _, choice, _ in curves))
    dtypes = list(dict.fromkeys(dtype for dtype, _, _ in curves))
    fig, axes = plt.subplots(len(choices), 1, sharex=True, figsize=(style.WIDTH, 0.9 + 2.3 * len(choices)))
    expected = table.set_index(["dtype", "way"])["expected_flips"]
    for ax, choice in zip(np.atleast_1d(axes), choices, strict=True):
        for dtype in dtypes:
            for line, way in zip(_LINES, DRAWN_WAYS, strict=True):
                # Few bits are drawn in the coarsest dtype alone: they hardly depend on it, and the lines would cover each other.
                if (dtype, choice, way) not in curves or (way != first_divergence.WRITER and dtype != dtypes[-1]):
                    continue
                wrote = way == first_divergence.WRITER
                _plot_curve(
                    ax, curves[dtype, choice, way], steps, band=wrote, color=DTYPE_COLOURS[dtype], linestyle=line,
                    linewidth=2 if wrote else 1.1,
                )  # fmt: skip
                if wrote and choice == first_divergence.GREEDY:
                    at = np.arange(steps + 1)
                    ax.plot(
                        at,
                        (1 - expected[dtype, way].value) ** at,
                        color=style.BLACK,
                        linestyle=(0, (1, 1)),
                        linewidth=1,
                    )
        ax.set(ylim=(-0.04, 1.06), ylabel="share together")
        ax.text(0.02, 0.06, choice, transform=ax.transAxes, fontweight="bold")
    np.atleast_1d(axes)[-1].set_xlabel("tokens written")
    handles = [Line2D([], [], color=DTYPE_COLOURS[d], linewidth=2, label=f"cache, {DTYPES[d]}") for d in dtypes]
    handles += [
        Line2D([], [], color=DTYPE_COLOURS[dtypes[-1]], linestyle=line, linewidth=1.1, label=f"{way}")
        for line, way in zip(_LINES[1:], DRAWN_WAYS[1:], strict=True)
    ]
    handles.append(Line2D([], [], color=style.BLACK, linestyle=(0, (1, 1)), linewidth=1, label="expected, cache"))
    fig.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=9)
    return fig


def figure_drift_and_snowball(positions: pd.DataFrame, behind: pd.DataFrame | None) -> Figure:
    """Draw the divergence along fixed texts, and around the parting of free ones."""
    fig, axes = plt.subplots(
        1 if behind is None else 2, 1, squeeze=False, figsize=(style.WIDTH, 3.4 if behind is None else 6.2)
    )
    along = axes[0, 0]
    ways = [way.name for way in drift_by_position.VARIANTS]
    for (dtype, way), rows in positions.groupby(["dtype", "way"], sort=False):
        rows = rows[rows["kl"] > 0]
        along.plot(
            rows["middle"], rows["kl"], color=DTYPE_COLOURS[dtype], linestyle=_LINES[ways.index(way)],
            marker=style.MARKERS[ways.index(way)], markersize=3.5, linewidth=1.1,
        )  # fmt: skip
    along.set(yscale="log", xlabel="position in the text (tokens)", ylabel="divergence (nats)")
    present = set(positions["way"])
    handles = [
        Line2D([], [], color=style.GREY, linestyle=line, marker=marker, markersize=4, label=way)
        for way, line, marker in zip(ways, _LINES, style.MARKERS, strict=False)
        if way in present
    ]
    handles += [
        Line2D([], [], color=DTYPE_COLOURS[d], linewidth=3, label=DTYPES[d]) for d in dict.fromkeys(positions["dtype"])
    ]
    if behind is not None:
        ax = axes[1, 0]
        # Before the limits are set: on a linear axis they would go below zero.
        ax.set_yscale("log")
        for dtype, rows in behind.groupby("dtype", sort=False):
            for column, line, filled in (("kl_forced", "-", True), ("kl_free", "--", False)):
                shown = rows[rows[column] > 0].sort_values("offset")
                ax.plot(
                    shown["offset"], shown[column], color=DTYPE_COLOURS[dtype], linestyle=line, marker="o", markersize=3.5,
                    markerfacecolor=DTYPE_COLOURS[dtype] if filled else "white", linewidth=1.1,
                )  # fmt: skip
            for column, words in (("kl_free", "each after its own text"), ("kl_forced", "both after one text")):
                ax.annotate(
                    words, (rows["offset"].max(), rows[column].max()), xytext=(0, 8), textcoords="offset points",
                    ha="right", fontsize=9.5, color=DTYPE_COLOURS[dtype],
                )  # fmt: skip
        ax.set_ylim(top=20 * behind["kl_free"].max())
        ax.axvline(0.5, color=style.GREY, linewidth=1, linestyle=":")
        ax.set(xlabel="tokens since the texts parted", ylabel="divergence (nats)")
    fig.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=9)
    return fig
