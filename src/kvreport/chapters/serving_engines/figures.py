"""Figures of the chapter on serving engines."""

import pandas as pd
from matplotlib.figure import Figure

from kvreport.chapters.serving_engines import rows as named
from kvreport.publishing import style
from kvreport.publishing.measures import said

_COLOURS = dict(zip(named.WAYS, (style.GREY, *style.PALETTE), strict=True))
# Where no bit moves: left of all that does.
_NOTHING = 1e-8


def figure_ways(table: pd.DataFrame) -> Figure:
    """Draw how far each way of asking moves log-probabilities, a row an engine and dtype, and a marker a way."""
    labels = [f"{one.engine}, {said(one.dtype)}" for one in table.itertuples()]
    names = list(dict.fromkeys(labels))
    fig, ax = style.rows(names, 1.5, 0.45, fontsize=9)
    for label, row in zip(labels, table.itertuples(), strict=True):
        which = named.WAYS.index(row.way)
        place = names.index(label) + 0.15 * (which - (len(named.WAYS) - 1) / 2)
        ax.plot(max(row.moved.value, _NOTHING), place, marker=style.MARKERS[which], color=_COLOURS[row.way],
            markersize=5, linestyle="")
    ax.axvline(_NOTHING, **style.REFERENCE)
    ax.set(xscale="log", xlabel="largest |Δ log p| against cold (nats)")
    powers = ax.xaxis.get_major_formatter()
    ax.xaxis.set_major_formatter(lambda at, place: "0" if at < 2 * _NOTHING else powers(at, place))
    looks, drawn = zip(named.WAYS, style.MARKERS, strict=True), set(table["way"])
    handles = [style.key(way, _COLOURS[way], marker=marker) for way, marker in looks if way in drawn]
    return style.with_legend(fig, handles, 3)


def figure_exactness(table: pd.DataFrame) -> Figure:
    """Draw how far each engine is from fp64, the closest first."""
    table = table.sort_values("error", key=lambda of: of.map(lambda one: one.value))
    fig, ax = style.rows(list(table["label"]), 1.0, 0.34, fontsize=9)
    for place, row in enumerate(table.itertuples()):
        style.plot_estimate(
            ax, row.error, place, marker="o", color=style.DTYPE_COLOURS.get(row.dtype, style.BLACK), markersize=5
        )
    ax.set(xscale="log", xlabel="mean |Δ log p| against fp64 (nats)")
    return fig
