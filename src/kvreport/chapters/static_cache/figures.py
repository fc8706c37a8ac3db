"""Figures of the chapter on static and dynamic caches.

Colour and marker are the kind of cache; hollow is published or eager.
"""

import matplotlib.pyplot as plt
import pandas as pd

from kvreport.chapters.static_cache import rows
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

_KINDS = {"none": (style.VERMILION, "s"), "dynamic": (style.BLUE, "o"), "static": (style.GREEN, "^")}
_MARK = {"markersize": 7, "linestyle": ""}


def _look(cache: str, hollow: bool) -> dict[str, str]:
    colour, marker = _KINDS[cache]
    return {"color": colour, "marker": marker, "markerfacecolor": "white" if hollow else colour}


def _kinds() -> list[plt.Line2D]:
    return [style.key(kind, colour, marker=marker, **_MARK) for kind, (colour, marker) in _KINDS.items()]


def _hollow(what: str) -> plt.Line2D:
    return style.key(what, marker="o", markerfacecolor="white", **_MARK)


def figure_published(beside: pd.DataFrame) -> plt.Figure:
    """Draw the document's tokens a second beside this run's `generate`, a line a device."""
    devices = list(dict.fromkeys(beside["device"]))
    fig, ax = style.rows(devices, 1.1, 0.5)
    for row in beside.itertuples():
        place = devices.index(row.device) + 0.18 * (list(_KINDS).index(row.cache) - 1)
        ax.plot(row.tokens_per_s, place, **_look(row.cache, row.published), **_MARK)
        if row.skipped:
            style.note(ax, "not compiled", (row.tokens_per_s, place), (9, -1), va="center", fontsize=8.5)
    ax.set(xscale="log", xlabel="tokens/s, whole call")
    style.plain_logarithm(ax.xaxis)
    return style.with_legend(fig, [*_kinds(), _hollow("published")], 4, "upper right")


def figure_grid(table: pd.DataFrame, limit: float) -> plt.Figure:
    """Draw tokens a second of every way, and the memory limit, from `tables.speeds`."""
    speed = table["speed"].map(lambda estimate: estimate.value)
    shown = table.loc[speed.sort_values(ascending=False).index].reset_index(drop=True)
    fig, ax = style.rows(shown["way"], 1.2, 0.34, fontsize=9.5)
    for row in shown.itertuples():
        style.plot_estimate(ax, row.speed, row.Index, **_look(row.cache, not row.compiled), **_MARK)
        beside = {"va": "center", "color": plt.rcParams["text.color"]}
        style.note(ax, f"{row.speed.value:.0f}", (row.speed.high, row.Index), (8, -1), **beside)
    ax.axvline(limit, color=style.GREY, linestyle="--")
    style.note(ax, f"limit of memory\n{limit:.0f}", (limit, len(shown) - 1), (-5, 0), ha="right", va="bottom")
    ax.set(xlabel="tokens/s", xlim=(0, None))
    handles = [*_kinds(), style.key("compiled", marker="o", **_MARK), _hollow("eager")]
    return style.with_legend(fig, handles, 5, "upper right", columnspacing=1)


def figure_length(steps: pd.DataFrame) -> plt.Figure:
    """Draw the time of a step against the number of tokens, from `tables.steps`."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.9))
    for way, some in steps.groupby(["cache", "compiled", "one_row", "large_pages"], sort=False):
        cache, compiled, one_row, large_pages = way
        middle = some.groupby("context")["seconds"].median() * 1e3
        if len(middle) > 30:
            # A mean over neighbours: single steps scatter by as much as the ways differ.
            middle = middle.rolling(15, center=True, min_periods=8).median()
        place = middle.dropna()
        line = "-." if large_pages else ":" if one_row else "-" if compiled else "--"
        look = _look(cache, not compiled) | {"linestyle": line, "markevery": max(1, len(place) // 6)}
        ax.plot(place.index, place, label=rows.label(*way), **look)
    ax.set(xlabel="tokens so far", ylabel="ms per step", yscale="log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    style.plain_logarithm(ax.yaxis)
    return style.with_legend(fig, ax.get_lines(), 2)


def figure_batches(found: pd.DataFrame) -> plt.Figure:
    """Draw the time of a step against its context, a panel a dtype and a line a batch, from `rows.contexts`."""
    by_dtype = found.groupby("dtype", sort=False)
    fig, axes = style.panels(1, len(by_dtype), 3.4, sharey=True)
    for ax, (dtype, of_dtype) in zip(axes[0], by_dtype, strict=True):
        for batch, some in of_dtype.groupby("batch"):
            (line,) = ax.plot(some["context"], some["ms"], marker="o", markersize=4)
            end = some["context"].iloc[-1], some["ms"].iloc[-1]
            style.note(ax, f"{batch}", end, (6, 0), va="center", color=line.get_color())
        ax.set(xscale="log", yscale="log", title=DTYPES[dtype], xlabel="tokens in the cache")
        ends = of_dtype["context"].min(), of_dtype["context"].max()
        ax.set_xticks(ends, [f"{tick:,}" for tick in ends])
        ax.xaxis.minorticks_off()
    axes[0, 0].set_ylabel("ms per step")
    style.plain_logarithm(axes[0, 0].yaxis)
    return fig


def figure_gains(gains: pd.DataFrame, book: pd.DataFrame) -> plt.Figure:
    """Draw ways of the loop over its eager dynamic one, from `tables.gains`; the book's stand faint behind."""
    ways = list(dict.fromkeys([*book["way"], *gains["way"]]))[::-1]
    fig, ax = style.rows(ways, 1.1, 0.38, fontsize=9.5)
    for table, look in ((book, style.FAINT), (gains, {"markersize": 6})):
        for row in table.itertuples():
            style.plot_estimate(ax, row.gain, ways.index(row.way), marker="o", color=style.BLUE, **look)
    ax.axvline(1, color=style.GREY, linestyle="--", linewidth=1)
    ax.set(xlabel="tokens/s / the eager dynamic loop's", xlim=(0, None))
    return fig
