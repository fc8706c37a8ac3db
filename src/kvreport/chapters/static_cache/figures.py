"""Figures of the chapter on static and dynamic caches. Colour and marker are the kind of cache; hollow is published or eager."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvreport.chapters.static_cache import rows
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

_KINDS = {"none": (style.VERMILION, "s"), "dynamic": (style.BLUE, "o"), "static": (style.GREEN, "^")}


def figure_published(beside: pd.DataFrame) -> Figure:
    """Draw the document's tokens a second beside this run's `generate`, a line a device."""
    devices = list(dict.fromkeys(beside["device"]))
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.1 + 0.5 * len(devices)))
    for row in beside.itertuples():
        colour, marker = _KINDS[row.cache]
        shift = 0.18 * (list(_KINDS).index(row.cache) - 1)
        place = devices.index(row.device) + shift
        ax.plot(
            row.tokens_per_s, place, marker=marker, color=colour, markersize=7, linestyle="",
            markerfacecolor="white" if row.published else colour,
        )
        if row.skipped:
            ax.annotate(
                "not compiled", (row.tokens_per_s, place), xytext=(9, -1), textcoords="offset points", va="center",
                fontsize=8.5, color=style.GREY,
            )
    ax.set_yticks(range(len(devices)), devices)
    ax.set_ylim(len(devices) - 0.5, -0.5)
    ax.set(xscale="log", xlabel="tokens/s, whole call")
    style.plain_logarithm(ax.xaxis)
    ax.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", markersize=7, label=kind)
        for kind, (colour, marker) in _KINDS.items()
    ]
    handles.append(
        Line2D(
            [], [], color=style.GREY, marker="o", markerfacecolor="white", linestyle="", markersize=7, label="published"
        )
    )
    fig.legend(handles=handles, loc="outside upper right", ncols=4, fontsize=9)
    return fig


def figure_grid(table: pd.DataFrame, limit: float) -> Figure:
    """Draw tokens a second of every way, and the memory limit, from `tables.speeds`."""
    shown = table.sort_values("speed", key=lambda column: column.map(lambda e: e.value)).reset_index(drop=True)
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.2 + 0.34 * len(shown)))
    for row in shown.itertuples():
        colour, marker = _KINDS[row.cache]
        ax.errorbar(
            row.speed.value, row.Index, xerr=[[row.speed.value - row.speed.low], [row.speed.high - row.speed.value]],
            fmt=marker, color=colour, markersize=7, markerfacecolor=colour if row.compiled else "white",
        )
        ax.annotate(
            f"{row.speed.value:.0f}", (row.speed.high, row.Index), xytext=(8, -1), textcoords="offset points",
            va="center", fontsize=9,
        )
    ax.axvline(limit, color=style.GREY, linestyle="--")
    ax.annotate(
        f"limit of memory\n{limit:.0f}", (limit, 0), xytext=(-5, 0),
        textcoords="offset points", ha="right", va="bottom", fontsize=9, color=style.GREY,
    )
    ax.set_yticks(range(len(shown)), shown["way"], fontsize=9.5)
    ax.set(xlabel="tokens/s", xlim=(0, None))
    ax.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=style.GREY, marker="o", linestyle="", markersize=7, label="compiled"),
        Line2D(
            [], [], color=style.GREY, marker="o", markerfacecolor="white", linestyle="", markersize=7, label="eager"
        ),
    ]
    fig.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=9)
    return fig


def figure_length(steps: pd.DataFrame) -> Figure:
    """Draw the time of a step against the number of tokens, from `tables.steps`."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.9))
    for way, some in steps.groupby(["cache", "compiled", "one_row", "large_pages"], sort=False):
        cache, compiled, one_row, large_pages = way
        colour, marker = _KINDS[cache]
        middle = some.groupby("context")["seconds"].median() * 1e3
        if len(middle) > 30:
            # A mean over neighbours: single steps scatter by as much as the ways differ.
            middle = middle.rolling(15, center=True, min_periods=8).median()
        place = middle.dropna()
        ax.plot(
            place.index, place, color=colour,
            linestyle="-." if large_pages else ":" if one_row else "-" if compiled else "--", marker=marker,
            markevery=max(1, len(place) // 6), markerfacecolor=colour if compiled else "white", label=rows.label(*way),
        )
    ax.set(xlabel="tokens so far", ylabel="ms per step", yscale="log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    style.plain_logarithm(ax.yaxis)
    fig.legend(loc="outside upper center", ncols=2, fontsize=9)
    return fig


def figure_batches(found: pd.DataFrame) -> Figure:
    """Draw the time of a step against its context, a panel a dtype and a line a batch, from `rows.contexts`."""
    dtypes = list(found["dtype"].unique())
    fig, axes = plt.subplots(1, len(dtypes), figsize=(style.WIDTH, 3.4), sharey=True, squeeze=False)
    for ax, dtype in zip(axes[0], dtypes, strict=True):
        of_dtype = found[found["dtype"] == dtype]
        for batch, some in of_dtype.groupby("batch"):
            (line,) = ax.plot(some["context"], some["ms"], marker="o", markersize=4)
            ax.annotate(
                f"{batch}", (some["context"].iloc[-1], some["ms"].iloc[-1]), xytext=(6, 0), textcoords="offset points",
                va="center", color=line.get_color(), fontsize=9,
            )
        ax.set(xscale="log", yscale="log", title=DTYPES[dtype], xlabel="tokens in the cache")
        ax.set_xticks(ticks := sorted(of_dtype["context"].unique())[::2], [f"{tick:,}" for tick in ticks])
        ax.xaxis.minorticks_off()
    axes[0, 0].set_ylabel("ms per step")
    style.plain_logarithm(axes[0, 0].yaxis)
    return fig


def figure_gains(gains: pd.DataFrame, book: pd.DataFrame) -> Figure:
    """Draw ways of the loop over its eager dynamic one, from `tables.gains`; the book's stand faint behind."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.1 + 0.38 * len(book)))
    ways = list(book["way"])
    ways += [way for way in gains["way"] if way not in ways]
    for table, look in ((book, {"alpha": 0.3, "markersize": 11, "linewidth": 6}), (gains, {"markersize": 6})):
        for row in table.itertuples():
            ax.errorbar(
                row.gain.value, ways.index(row.way), xerr=[[row.gain.value - row.gain.low],
                    [row.gain.high - row.gain.value]],
                fmt="o", color=style.BLUE, **look,
            )
    ax.axvline(1, color=style.GREY, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(ways)), ways, fontsize=9.5)
    ax.set(xlabel="tokens/s over the eager dynamic loop's", xlim=(0, None))
    ax.grid(axis="y", visible=False)
    return fig
