"""Figures of the chapter on whether the difference matters.

Colour is the dtype; hollow grey is what others published.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvreport.chapters.does_it_matter import rows as named
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES, scaled

_DTYPE_MARKERS = dict(zip(style.DTYPE_COLOURS, style.MARKERS, strict=False))
# Of the ways in the curves: the line says which, the colour says in which dtype.
_LINES = ("-", "--", "-.", ":")
# Comparisons in a bin of margins below which its share says next to nothing and is not drawn.
_FEWEST = 40
# An interval on a logarithmic axis ends at this share of its value.
_LEAST = 1e-3


def _plot_axes(axes: pd.DataFrame, ways: list[str], log: plt.Axes, zero: plt.Axes | None, faint: bool) -> None:
    dtypes = list(dict.fromkeys(axes["dtype"]))
    for row in axes[axes["way"].isin(ways)].itertuples():
        place = ways.index(row.way) + 0.26 * (dtypes.index(row.dtype) - (len(dtypes) - 1) / 2)
        drawn = {"color": style.DTYPE_COLOURS[row.dtype], "marker": _DTYPE_MARKERS[row.dtype], "markersize": 5}
        drawn |= style.FAINT | {"markeredgewidth": 0} if faint else {}
        if row.kl.value == 0:
            zero.plot(0, place, **drawn)
        elif faint:
            log.plot(row.kl.value, place, **drawn)
        else:
            style.plot_estimate(log, row.kl, place, down_to=_LEAST, **drawn)


def _break(zero: plt.Axes, log: plt.Axes) -> None:
    """Set a zero beside a logarithmic axis, which has none, behind a break."""
    zero.set(xlim=(-1, 1), xticks=[0], xticklabels=["0"])
    zero.spines["right"].set_visible(False)
    log.spines["left"].set_visible(False)
    log.tick_params(left=False)
    stroke = {"marker": [(-1, -2), (1, 2)], "markersize": 8, "color": style.BLACK}
    for ax, edge in ((zero, 1), (log, 0)):
        ax.plot(edge, 0, transform=ax.transAxes, clip_on=False, linestyle="none", **stroke)


def figure_axes(axes: pd.DataFrame, elsewhere: pd.DataFrame | None = None, book: pd.DataFrame | None = None) -> Figure:
    """Draw the mean divergence of every change, above what others published or over the book's, which stands faint."""
    ways = list(dict.fromkeys(axes["way"]))
    both = axes if book is None else pd.concat([book[book["way"].isin(ways)], axes])
    labels = ways if elsewhere is None else [*ways, *elsewhere["what"]]
    zeros = any(estimate.value == 0 for estimate in both["kl"])
    widths = {"width_ratios": [1, 13][-1 - zeros :], "gridspec_kw": {"wspace": 0.02}}
    fig, panels = style.panels(1, 1 + zeros, 0.9 + 0.29 * len(labels), sharey=True, **widths)
    log, zero = panels[0, -1], panels[0, 0] if zeros else None
    handles = style.dtype_keys(axes["dtype"], _DTYPE_MARKERS)
    if book is not None:
        _plot_axes(book, ways, log, zero, faint=True)
        handles.append(style.key("the book", marker="o", **style.FAINT))
    _plot_axes(axes, ways, log, zero, faint=False)
    kinds = [named.KINDS[way] for way in ways]
    for ax in panels[0]:
        style.name_rows(ax, labels, fontsize=8.5)
        for index in range(1, len(ways)):
            if kinds[index] != kinds[index - 1]:
                ax.axhline(index - 0.5, color="#bbbbbb", linewidth=0.8)
        if elsewhere is not None:
            ax.axhline(len(ways) - 0.5, color=style.GREY, linewidth=0.8)
    if elsewhere is not None:
        hollow = {"marker": "D", "markerfacecolor": "white", "linestyle": ""}
        log.plot(elsewhere["mean_kl_nats"], range(len(ways), len(labels)), color=style.GREY, markersize=5, **hollow)
        handles.append(style.key("llama.cpp, 8B", **hollow))
    if zeros:
        _break(zero, log)
    log.set(xscale="log", xlabel="mean divergence (nats per token)")
    log.xaxis.set_major_locator(plt.LogLocator(numticks=7))
    return style.with_legend(fig, handles, 4)


def figure_margins(margins: pd.DataFrame) -> Figure:
    """Draw how large margins are, and how likely a top-1 flip is at each."""
    fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(style.WIDTH, 4.8), height_ratios=[2, 3])
    for dtype, rows in margins.groupby("dtype", sort=False):
        colour, marker = style.DTYPE_COLOURS[dtype], _DTYPE_MARKERS[dtype]
        # The first bin goes down to 0, which a logarithmic axis puts infinitely far away.
        left = rows["low"].where(rows["low"] > 0, 0.5)
        for look in ({"fill": True, "alpha": 0.35}, {}):
            top.stairs(rows["share_of_margins"], [*left, rows["high"].iloc[-1]], color=colour, **look)
        seen = rows.assign(middle=np.sqrt(left * rows["high"]))[rows["tokens"] >= _FEWEST]
        # Where there are no margins there is nothing to expect.
        bottom.plot(seen["middle"], seen["predicted"], color=colour, linestyle="--", linewidth=1.2)
        for row in seen.itertuples():
            look = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1}
            style.plot_estimate(bottom, row.seen, row.middle, upright=True, **look)
    top.set_ylabel("share of\ntokens")
    bottom.set(xscale="log", xlabel="margin of the most probable token (ulps of the largest logit)")
    bottom.set(ylabel="top-1 flips", ylim=(-0.02, None))
    handles = style.dtype_keys(margins["dtype"], _DTYPE_MARKERS)
    handles += [style.key("measured", marker="o"), style.key("from the shifts alone", linestyle="--")]
    return style.with_legend(fig, handles, 4)


def figure_moved(table: pd.DataFrame) -> Figure:
    """Draw the share of texts that each change moves: filled where they are greedy, hollow where they are sampled."""
    labels, dtypes = list(dict.fromkeys(table["label"])), [d for d in style.DTYPE_COLOURS if d in set(table["dtype"])]
    lanes = [(choice, dtype) for choice in named.CHOICES for dtype in dtypes]
    lanes = [lane for lane in lanes if lane in set(zip(table["choice"], table["dtype"], strict=True))]
    fig, ax = style.rows([label.replace(", beside ", "\nbeside ") for label in labels], 0.9, 0.45, fontsize=8.5)
    for row in table.itertuples():
        place = labels.index(row.label) + 0.2 * (lanes.index((row.choice, row.dtype)) - (len(lanes) - 1) / 2)
        look = {"color": style.DTYPE_COLOURS[row.dtype], "marker": _DTYPE_MARKERS[row.dtype], "markersize": 5}
        look |= {"linewidth": 1} | ({"markerfacecolor": "white"} if row.choice == named.SAMPLED else {})
        style.plot_estimate(ax, scaled(row.estimate, 100), place, **look)
    ax.set(xlim=(-3, 103), xlabel="texts that the change moves (%)")
    handles = style.dtype_keys(dtypes, _DTYPE_MARKERS)
    handles.append(style.key("sampled", marker="o", markerfacecolor="white"))
    return style.with_legend(fig, handles, 4)


def _plot_band(ax: plt.Axes, x: pd.Series, found: pd.Series, **how) -> None:
    """Draw estimates, where there are any, as a curve with its interval; a logarithmic axis takes those above 0."""
    if kept := [(place, one) for place, one in zip(x, found, strict=True) if one and one.value > 0]:
        places, found = zip(*kept, strict=True)
        ax.plot(places, [one.value for one in found], markersize=3.5, linewidth=1.1, **how)
        low, high = [max(one.low, _LEAST * one.value) for one in found], [one.high for one in found]
        ax.fill_between(places, low, high, color=how["color"], alpha=0.12, linewidth=0)


def _plot_snowball(ax: plt.Axes, behind: pd.DataFrame) -> None:
    # Before the limits are set: on a linear axis they would go below zero.
    ax.set_yscale("log")
    for dtype, rows in behind.groupby("dtype", sort=False):
        rows, colour = rows.sort_values("offset"), style.DTYPE_COLOURS[dtype]
        look = {"color": colour, "marker": "o"}
        _plot_band(ax, rows["offset"], rows["kl_forced"], linestyle="-", markerfacecolor=colour, **look)
        _plot_band(ax, rows["offset"], rows["kl_free"], linestyle="--", markerfacecolor="white", **look)
    look = {"marker": "o", "markersize": 4}
    handles = [
        style.key("each run reads its own text", linestyle="--", markerfacecolor="white", **look),
        style.key("both runs read one text", linestyle="-", **look),
    ]
    ax.legend(handles=handles, loc="center right", bbox_to_anchor=(1, 0.62), fontsize=9)
    ax.axvline(0.5, **style.REFERENCE)
    ax.set(xlabel="tokens since the texts diverged", ylabel="divergence (nats)")


def figure_by_position(table: pd.DataFrame) -> Figure:
    """Draw how far apart passes are along the longest texts, over that at the first positions.

    The divergence between the two has a linear axis of its own: on the errors' a growth by half would hardly show.
    """
    looks = {
        "drift_growth": ("between the two", {"linestyle": ":", "marker": "^"}),
        "uncached_error_growth": ("fp64 to no cache", {"linestyle": "--", "marker": "s", "markerfacecolor": "white"}),
        "error_growth": ("fp64 to cache", {"linestyle": "-", "marker": "o"}),
    }
    dtypes = [dtype for dtype in DTYPES if dtype in set(table["dtype"])]
    fig, axes = style.panels(1 + len(dtypes), 1, 2.6 + 1.9 * len(dtypes), sharex=True)
    top, *others = axes.flat
    for ax, dtype in zip(others, dtypes, strict=True):
        ax.sharey(others[0])
        rows, colour = table[table["dtype"] == dtype], style.DTYPE_COLOURS[dtype]
        _plot_band(top, rows["middle"], rows["kl_growth"], color=colour, **looks["drift_growth"][1])
        for column, (_, look) in looks.items():
            _plot_band(ax, rows["middle"], rows[column], color=colour, **look)
        ax.axhline(1, **style.REFERENCE)
        ax.set(yscale="log", ylabel=f"{DTYPES[dtype]}: distance /\nfirst positions'")
        style.plain_logarithm(ax.yaxis)
    top.axhline(1, **style.REFERENCE)
    top.set(xscale="log", ylim=(0, None), ylabel="divergence /\nfirst positions'")
    first, end = table["read_from"].min(), table["read_to"].max()
    lengths = [2**octave for octave in range(20) if first <= 2**octave <= end + 1]
    axes[-1, 0].set_xticks(lengths, labels=[f"{length:,}" for length in lengths])
    axes[-1, 0].set(xlabel="position in the text (tokens)")
    axes[-1, 0].minorticks_off()
    handles = [style.key(name, **look) for column, (name, look) in looks.items() if table[column].notna().any()]
    return style.with_legend(fig, [*handles, *style.dtype_keys(dtypes)], 3)


def figure_drift_and_snowball(positions: pd.DataFrame, behind: pd.DataFrame | None) -> Figure:
    """Draw the divergence along fixed texts over their first quarter's, and around the place where free ones diverge.

    The upper axis is linear and as wide as the estimates: on one of ten decades a growth by half would not show.
    """
    fig, axes = style.panels(*((1, 1, 3.4) if behind is None else (2, 1, 6.2)))
    along, looks = axes[0, 0], dict(zip(named.ALONG, zip(_LINES, style.MARKERS, strict=False), strict=False))
    for (dtype, way), rows in positions.groupby(["dtype", "way"], sort=False):
        line, marker = looks[way]
        if rows["over_first"].notna().all():
            look = {"color": style.DTYPE_COLOURS[dtype], "linestyle": line, "marker": marker}
            _plot_band(along, rows["middle"], rows["over_first"], **look)
    along.axhline(1, **style.REFERENCE)
    along.set(xlabel="position in the text (tokens)", ylabel="divergence / first quarter's", ylim=(0, None))
    handles = [
        style.key(way, linestyle=line, marker=marker, markersize=4)
        for way, (line, marker) in looks.items() if way in set(positions["way"])
    ]
    dtypes = positions["dtype"] if behind is None else [*positions["dtype"], *behind["dtype"]]
    if behind is not None:
        _plot_snowball(axes[1, 0], behind)
    return style.with_legend(fig, [*handles, *style.dtype_keys(dtypes)], 2)
