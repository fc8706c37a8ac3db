"""Figures of the chapter on reusing a prompt's cache."""

from collections.abc import Callable, Iterable, Mapping

import matplotlib.pyplot as plt
import pandas as pd

from kvreport.chapters.prompt_reuse import rows as named
from kvreport.publishing import style, wording


def figure_first_layer(table: pd.DataFrame, published: pd.DataFrame) -> plt.Figure:
    """Draw the share of differing first-layer keys against the second part's query length, a panel a processor."""
    table = table[table["variant"] == named.POSTED].sort_values("rows_fed", kind="stable")
    looks = {
        model: {"marker": style.MARKERS[i], "linestyle": ("-", ":")[i % 2]}
        for i, model in enumerate(published["model"])
    }
    hollow = {"markerfacecolor": "white", "linestyle": ""}
    processors = list(dict.fromkeys(table["processor"]))
    fig, axes = style.panels(1, len(processors), 3.6, sharex=True, sharey=True)
    for ax, processor in zip(axes[0], processors, strict=True):
        for (model, dtype), rows in table[table["processor"] == processor].groupby(["model", "dtype"]):
            ax.plot(rows["rows_fed"], rows["share"], color=style.DTYPE_COLOURS[dtype], **looks[model])
        for row in published.itertuples():
            ax.plot(row.rows_fed, row.share, color=style.GREY, markersize=7, **looks[row.model] | hollow)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set(xlabel="tokens fed in the second part", ylim=(-0.03, 1.03))
        ax.set_title(wording.processor(processor), fontsize=10, loc="left")
    axes[0, 0].set_ylabel("share of keys that differ")
    handles = [*style.dtype_keys(table["dtype"]), *(style.key(model, **look) for model, look in looks.items())]
    handles.append(style.key("published", marker="o", **hollow))
    return style.with_legend(fig, handles, 3)


_PARTS = {"response": {"marker": "o", "linestyle": "-"}, "prompt": {"marker": "s", "linestyle": ":"}}


def figure_layers(curves: pd.DataFrame) -> plt.Figure:
    """Draw share and size of the difference against the layer, one column a model, from `tables.by_layer`."""
    models = list(dict.fromkeys(curves["model"]))
    fig, axes = style.panels(2, len(models), 4.6, sharex="col", sharey="row")
    # Keys and values go together; the mean of the two keeps the panels readable, the data file has both.
    quantities = ["share", "relative_roundoffs"]
    means = curves.groupby(["model", "dtype", "part", "layer"])[quantities].mean().reset_index("layer")
    for (top, bottom), model in zip(axes.T, models, strict=True):
        for (dtype, part), rows in means.loc[model].groupby(["dtype", "part"], sort=False):
            look = _PARTS[part] | {"color": style.DTYPE_COLOURS[dtype], "linewidth": 1.2, "markersize": 3.5}
            positive = rows[rows["relative_roundoffs"] > 0]
            top.plot(rows["layer"], rows["share"], **look)
            bottom.plot(positive["layer"], positive["relative_roundoffs"], **look)
        top.text(0.03, 0.97, model, transform=top.transAxes, va="top", fontsize=10, fontweight="bold")
        bottom.set(xlabel="layer", yscale="log")
        bottom.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set(ylabel="share that differs", ylim=(-0.03, 1.15))
    axes[1, 0].set_ylabel("relative difference\n/ unit roundoff")
    handles = style.dtype_keys(curves["dtype"])
    handles += [style.key(part, markersize=3.5, **look) for part, look in _PARTS.items()]
    return style.with_legend(fig, handles, 4)


_WAYS = {named.AS_IS: (style.VERMILION, "s"), named.SHARED: (style.BLUE, "o")}
_BOOK = style.FAINT | {"linestyle": "-"}


def _shares(
    rows: Iterable[str], series: Mapping[str, tuple[str, str]], of: str, *keys: plt.Line2D
) -> tuple[plt.Figure, plt.Axes, Callable[[str, str], float]]:
    """Name a figure's rows and series, by colour and marker; the last returned tells where a share is drawn."""
    labels, names = list(dict.fromkeys(rows)), list(series)
    fig, ax = style.rows(labels, 1.2, 0.4, fontsize=9)
    ax.set(xlabel=of, xlim=(-0.03, 1.03))
    handles = [style.key(name, colour, marker=marker) for name, (colour, marker) in series.items()]
    fig.legend(handles=[*handles, *keys], loc="outside upper right", ncols=3, fontsize=9)
    return fig, ax, lambda row, name: labels.index(row) + 0.6 * ((names.index(name) + 0.5) / len(names) - 0.5)


def figure_outcomes(table: pd.DataFrame, book: pd.DataFrame | None = None) -> plt.Figure:
    """Draw the share of runs with equal tokens for every case and dtype, and faintly the published ones."""
    table = table.assign(row=table["case"] + ", " + table["dtype"])
    keys = [] if book is None else [style.key("the book", **_BOOK)]
    fig, ax, place = _shares(table["row"], _WAYS, "share of runs with equal tokens", *keys)
    for row in table.itertuples():
        (colour, marker), at = _WAYS[row.way], place(row.row, row.way)
        style.plot_estimate(ax, row.estimate, at, marker=marker, color=colour)
        count = f"{row.equal}/{row.runs}"
        style.note(ax, count, (1.04, at), va="center", fontsize=8, color=colour, annotation_clip=False)
    if book is not None:
        book = book.assign(row=book["case"] + ", " + book["dtype"])
        for row in book[book["row"].isin(table["row"])].itertuples():
            ends, at = (row.estimate.low, row.estimate.high), place(row.row, row.way)
            ax.plot(ends, (at, at), color=_WAYS[row.way][0], solid_capstyle="butt", **_BOOK)
    return fig


def figure_cuts(table: pd.DataFrame) -> plt.Figure:
    """Draw the share of cuts that change the ids by place, one marker a vocabulary, from `tables.cuts`."""
    looks = dict(zip(dict.fromkeys(table["tokenizer"]), zip(style.PALETTE, style.MARKERS, strict=False), strict=False))
    fig, ax, place = _shares(table["place"], looks, "share of cuts that change the ids")
    for row in table.itertuples():
        colour, marker = looks[row.tokenizer]
        style.plot_estimate(ax, row.estimate, place(row.place, row.tokenizer), marker=marker, color=colour)
    return fig
