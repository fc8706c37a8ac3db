"""Figures of the chapter on whether the difference matters. Colour is the dtype; hollow grey is what others published."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from kvreport.chapters.does_it_matter import rows as named
from kvreport.publishing import style
from kvreport.publishing.style import DTYPE_COLOURS
from kvreport.publishing.wording import DTYPES

_DTYPE_MARKERS = dict(zip(DTYPE_COLOURS, style.MARKERS, strict=False))
# Of the ways in the curves: the line says which, the colour says in which dtype.
_LINES = ("-", "--", "-.", ":")
# Comparisons in a bin of margins below which its share says next to nothing and is not drawn.
_FEWEST = 40


def _markers(dtypes: list[str]) -> list[Line2D]:
    return [
        Line2D([], [], color=DTYPE_COLOURS[d], marker=_DTYPE_MARKERS[d], linestyle="", label=DTYPES[d]) for d in dtypes
    ]


def _plot_axes(axes: pd.DataFrame, ways: list[str], log: Axes, zero: Axes | None, faint: bool) -> None:
    dtypes = list(dict.fromkeys(axes["dtype"]))
    for row in axes[axes["way"].isin(ways)].itertuples():
        place = ways.index(row.way) + 0.26 * (dtypes.index(row.dtype) - (len(dtypes) - 1) / 2)
        drawn = {"color": DTYPE_COLOURS[row.dtype], "marker": _DTYPE_MARKERS[row.dtype], "markersize": 5}
        drawn |= {"markersize": 10, "alpha": 0.25, "markeredgewidth": 0} if faint else {}
        if row.kl.value == 0:
            zero.plot(0, place, **drawn)
        elif faint:
            log.plot(row.kl.value, place, **drawn)
        else:
            # An interval that reaches down to 0 goes to the edge.
            low = max(row.kl.low, row.kl.value / 1e3)
            log.errorbar(row.kl.value, place, xerr=[[row.kl.value - low], [row.kl.high - row.kl.value]], **drawn)


def figure_axes(axes: pd.DataFrame, elsewhere: pd.DataFrame | None = None, book: pd.DataFrame | None = None) -> Figure:
    """Draw the mean divergence of every change, above what others published or over the book's, which stands faint."""
    ways = list(dict.fromkeys(axes["way"]))
    both = axes if book is None else pd.concat([book[book["way"].isin(ways)], axes])
    labels = ways if elsewhere is None else [*ways, *elsewhere["what"]]
    # A logarithmic axis has no zero: what is exactly 0 stands beside it, behind a break.
    zeros = any(estimate.value == 0 for estimate in both["kl"])
    fig, panels = plt.subplots(
        1, 1 + zeros, sharey=True, squeeze=False, width_ratios=[1, 13][-1 - zeros :],
        figsize=(style.WIDTH, 0.9 + 0.29 * len(labels)), gridspec_kw={"wspace": 0.02},
    )
    log, zero = panels[0, -1], panels[0, 0] if zeros else None
    if book is not None:
        _plot_axes(book, ways, log, zero, faint=True)
    _plot_axes(axes, ways, log, zero, faint=False)
    kinds = [named.KINDS[way] for way in ways]
    for ax in panels[0]:
        for index in range(1, len(ways)):
            if kinds[index] != kinds[index - 1]:
                ax.axhline(index - 0.5, color="#bbbbbb", linewidth=0.8)
        ax.grid(axis="y", visible=False)
    if elsewhere is not None:
        for index, value in enumerate(elsewhere["mean_kl_nats"]):
            log.plot(value, len(ways) + index, marker="D", color=style.GREY, markerfacecolor="white", markersize=5)
        for ax in panels[0]:
            ax.axhline(len(ways) - 0.5, color=style.GREY, linewidth=0.8)
    if zeros:
        zero.set(xlim=(-1, 1), xticks=[0])
        zero.set_xticklabels(["0"])
        zero.spines["right"].set_visible(False)
        log.spines["left"].set_visible(False)
        log.tick_params(left=False)
        for ax, edge in ((zero, 1), (log, 0)):
            ax.plot(
                edge, 0, transform=ax.transAxes, marker=[(-1, -2), (1, 2)], markersize=8, color="black", clip_on=False,
                linestyle="none",
            )
    panels[0, 0].set_yticks(range(len(labels)), labels, fontsize=8.5)
    log.set_ylim(len(labels) - 0.5, -0.5)
    log.set(xscale="log", xlabel="mean divergence (nats per token)")
    log.xaxis.set_major_locator(LogLocator(numticks=7))
    handles = _markers(list(dict.fromkeys(axes["dtype"])))
    if elsewhere is not None:
        handles += [
            Line2D([], [], color=style.GREY, marker="D", markerfacecolor="white", linestyle="", label="llama.cpp, 8B")
        ]
    if book is not None:
        handles += [
            Line2D([], [], color=style.GREY, marker="o", markersize=10, alpha=0.25, linestyle="", label="the book")
        ]
    fig.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=9)
    return fig


def figure_margins(margins: pd.DataFrame) -> Figure:
    """Draw how large margins are, and how likely a top-1 flip is at each."""
    fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(style.WIDTH, 4.8), height_ratios=[2, 3])
    for dtype, rows in margins.groupby("dtype", sort=False):
        colour, marker = DTYPE_COLOURS[dtype], _DTYPE_MARKERS[dtype]
        # The first bin goes down to 0, which a logarithmic axis puts infinitely far away.
        left = rows["low"].where(rows["low"] > 0, 0.5)
        top.stairs(rows["share_of_margins"], [*left, rows["high"].iloc[-1]], color=colour, fill=True, alpha=0.35)
        top.stairs(rows["share_of_margins"], [*left, rows["high"].iloc[-1]], color=colour)
        middle = np.sqrt(left * rows["high"])
        seen = rows[rows["tokens"] >= _FEWEST]
        # Where there are no margins there is nothing to expect.
        bottom.plot(middle[seen.index], seen["predicted"], color=colour, linestyle="--", linewidth=1.2)
        for row, at in zip(seen.itertuples(), middle[seen.index], strict=True):
            bottom.errorbar(
                at, row.seen.value, yerr=[[row.seen.value - row.seen.low], [row.seen.high - row.seen.value]],
                color=colour, marker=marker, markersize=4, linewidth=1,
            )
    top.set_ylabel("share of\ntokens")
    bottom.set(xscale="log", xlabel="margin of the most probable token (ulps of the largest logit)")
    bottom.set_ylabel("top-1 flips")
    bottom.set_ylim(-0.02, None)
    handles = _markers(list(dict.fromkeys(margins["dtype"])))
    handles += [
        Line2D([], [], color=style.GREY, marker="o", linestyle="", label="measured"),
        Line2D([], [], color=style.GREY, linestyle="--", label="from the shifts alone"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=9)
    return fig


# Which curves are drawn: enough to compare, few enough to tell apart.
DRAWN_WAYS = (named.CACHED, named.KV_INT8, named.KV_INT4, named.WEIGHTS_4)


def _plot_curve(ax: Axes, curve: pd.DataFrame, steps: int, band: bool, **how) -> None:
    x = [*curve["step"], steps]
    share, low, high = ([*curve[name], curve[name].iloc[-1]] for name in ("share", "low", "high"))
    ax.step(x, share, where="post", **how)
    if band:
        ax.fill_between(x, low, high, step="post", color=how["color"], alpha=0.15, linewidth=0)


def figure_partings(curves: pd.DataFrame, steps: int) -> Figure:
    """Draw for both choices the share of texts that still equal the baseline's."""
    choices, dtypes = (list(dict.fromkeys(curves[name])) for name in ("choice", "dtype"))
    fig, axes = plt.subplots(len(choices), 1, sharex=True, figsize=(style.WIDTH, 0.9 + 2.3 * len(choices)))
    for ax, choice in zip(np.atleast_1d(axes), choices, strict=True):
        for (dtype, way), curve in curves[curves["choice"] == choice].groupby(["dtype", "way"], sort=False):
            wrote = way == named.CACHED
            # Few bits are drawn in the coarsest dtype alone: they hardly depend on it, and the lines would cover each
            # other.
            if way in DRAWN_WAYS and (wrote or dtype == dtypes[-1]):
                _plot_curve(
                    ax, curve, steps, band=wrote, color=DTYPE_COLOURS[dtype], linestyle=_LINES[DRAWN_WAYS.index(way)],
                    linewidth=2 if wrote else 1.1,
                )
        ax.set(ylim=(-0.04, 1.06), ylabel="texts still equal")
        ax.text(0.02, 0.06, choice, transform=ax.transAxes, fontweight="bold")
    np.atleast_1d(axes)[-1].set_xlabel("tokens generated")
    handles = [Line2D([], [], color=DTYPE_COLOURS[d], linewidth=2, label=f"cache, {DTYPES[d]}") for d in dtypes]
    handles += [
        Line2D(
            [], [], color=DTYPE_COLOURS[dtypes[-1]], linestyle=line, linewidth=1.1, label=f"{way}, {DTYPES[dtypes[-1]]}"
        )
        for line, way in zip(_LINES[1:], DRAWN_WAYS[1:], strict=True)
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=9)
    return fig


def _plot_band(ax: Axes, x: pd.Series, found: pd.Series, **how) -> None:
    """Draw estimates as a curve with its interval; a logarithmic axis takes those above 0."""
    kept = [(place, one) for place, one in zip(x, found, strict=True) if one.value > 0]
    if kept:
        places, value = [place for place, _ in kept], [one.value for _, one in kept]
        ax.plot(places, value, markersize=3.5, linewidth=1.1, **how)
        low, high = [max(one.low, one.value / 1e3) for _, one in kept], [one.high for _, one in kept]
        ax.fill_between(places, low, high, color=how["color"], alpha=0.12, linewidth=0)


def figure_drift_and_snowball(positions: pd.DataFrame, behind: pd.DataFrame | None) -> Figure:
    """Draw the divergence along fixed texts over that of their first quarter, and around the place where free ones diverge.

    The upper axis is linear and as wide as the estimates: on one of ten decades a growth by half would not show.
    """
    fig, axes = plt.subplots(
        1 if behind is None else 2, 1, squeeze=False, figsize=(style.WIDTH, 3.4 if behind is None else 6.2)
    )
    along = axes[0, 0]
    for (dtype, way), rows in positions.groupby(["dtype", "way"], sort=False):
        place = named.ALONG.index(way)
        if rows["over_first"].notna().all():
            _plot_band(
                along, rows["middle"], rows["over_first"], color=DTYPE_COLOURS[dtype], linestyle=_LINES[place],
                marker=style.MARKERS[place],
            )
    along.axhline(1, color=style.GREY, linewidth=1, linestyle=":")
    along.set(xlabel="position in the text (tokens)", ylabel="divergence / first quarter's")
    along.set_ylim(bottom=0)
    present = set(positions["way"])
    handles = [
        Line2D([], [], color=style.GREY, linestyle=line, marker=marker, markersize=4, label=way)
        for way, line, marker in zip(named.ALONG, _LINES, style.MARKERS, strict=False)
        if way in present
    ]
    dtypes = dict.fromkeys([*positions["dtype"], *(() if behind is None else behind["dtype"])])
    handles += [Line2D([], [], color=DTYPE_COLOURS[dtype], linewidth=3, label=DTYPES[dtype]) for dtype in dtypes]
    if behind is not None:
        ax = axes[1, 0]
        # Before the limits are set: on a linear axis they would go below zero.
        ax.set_yscale("log")
        for dtype, rows in behind.groupby("dtype", sort=False):
            rows = rows.sort_values("offset")
            for column, line, filled in (("kl_forced", "-", True), ("kl_free", "--", False)):
                _plot_band(
                    ax, rows["offset"], rows[column], color=DTYPE_COLOURS[dtype], linestyle=line, marker="o",
                    markerfacecolor=DTYPE_COLOURS[dtype] if filled else "white",
                )
        look = {"color": style.GREY, "marker": "o", "markersize": 4}
        below = [
            Line2D([], [], linestyle="--", markerfacecolor="white", label="each run reads its own text", **look),
            Line2D([], [], label="both runs read one text", **look),
        ]
        ax.legend(handles=below, loc="center right", bbox_to_anchor=(1, 0.62), fontsize=9)
        ax.axvline(0.5, color=style.GREY, linewidth=1, linestyle=":")
        ax.set(xlabel="tokens since the texts diverged", ylabel="divergence (nats)")
    fig.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=9)
    return fig
