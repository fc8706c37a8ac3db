"""Figures of the chapter on which path is right.

Colour is the dtype, or where rows name the dtype, the path; filled is the cached path, hollow the uncached one.
"""

import itertools

import matplotlib.pyplot as plt
import pandas as pd

from kvbook.measuring import UNIT_ROUNDOFF
from kvreport.chapters.which_path_is_right.rows import AS_LOADED, CACHED, CHECK, EAGER, INDEPENDENT, LEAST_EXPLAINED
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

# Of a ratio's axis, by the most that it may span.
_TICKS = (
    (2, (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6)), (8, (0.3, 0.4, 0.5, 0.7, 1, 1.4, 2, 2.8, 4)),
    (float("inf"), (0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100)),
)
_PATHS = {
    CACHED: {"color": style.BLUE, "marker": "o"},
    EAGER: {"color": style.VERMILION, "marker": "s", "markerfacecolor": "white"},
}


def _pair(ax: plt.Axes, x: pd.Series, rows: pd.DataFrame, dtype: str, unit: float = 1.0) -> None:
    drawn = {"color": style.DTYPE_COLOURS[dtype], "marker": "o", "linewidth": 1.2}
    ax.plot(x, rows["error_full"] / unit, linestyle="--", markersize=6, markerfacecolor="white", **drawn)
    ax.plot(x, rows["error"] / unit, linestyle="-", markersize=3, **drawn)


def figure_layers(layers: pd.DataFrame) -> plt.Figure:
    """Draw the error of both paths against the layer, on the first model, with the reference's own error far below."""
    # An error of zero, as after most embeddings, has no place on a logarithmic axis.
    first = layers[(layers["model"] == layers["model"].iloc[0]) & (layers["error"] > 0)]
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.2))
    cached = first[first["path"] == CACHED]
    for dtype, rows in cached[cached["error_full"] > 0].groupby("dtype", sort=False):
        _pair(ax, rows["layer"], rows, dtype)
    references = ((AS_LOADED, "x", "loaded in fp64", -22), (CHECK, "+", "the reference, with and without a cache", 7))
    for path, marker, label, shift in references:
        own = first[first["path"] == path]
        if len(own):
            ax.plot(own["layer"], own["error"], color=style.BLACK, marker=marker, linestyle=":", linewidth=1)
            at = own["layer"].iloc[-1], own["error"].iloc[-1]
            style.note(ax, label, at, (0, shift), ha="right", color=plt.rcParams["text.color"])
    ax.set(yscale="log", xlabel="hidden state after layer (last: logits)", ylabel="relative error")
    ax.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    return style.with_legend(fig, style.solid_and_dashed(cached["dtype"], "cached", "no cache"), 5)


def _labels(table: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Name each pair of model and dtype; of one model the dtype says enough."""
    pairs = dict.fromkeys(zip(table["model"], table["dtype"], strict=True))
    several = len({model for model, _ in pairs}) > 1
    return {(m, dtype): f"{m.rpartition('/')[2]}, {DTYPES[dtype]}" if several else DTYPES[dtype] for m, dtype in pairs}


def _plot_paths(table: pd.DataFrame, column: str, ax: plt.Axes) -> None:
    labels = _labels(table)
    for row in table[table["path"].isin(_PATHS) & table[column].notna()].itertuples():
        style.plot_estimate(ax, getattr(row, column), _place(labels, row), zorder=3, **_PATHS[row.path])
    style.name_rows(ax, list(labels.values()))


def _place(labels: dict[tuple[str, str], str], row) -> float:
    return list(labels).index((row.model, row.dtype)) + (-0.17 if row.path == CACHED else 0.17)


def _path_handles() -> list[plt.Line2D]:
    return [plt.Line2D([], [], linestyle="", label=path, **look) for path, look in _PATHS.items()]


def figure_ratios(series: pd.DataFrame, texts: pd.DataFrame, book: pd.DataFrame | None = None) -> plt.Figure:
    """Draw each path's error over the uncached one's, each text as a tick; the book's estimates stand faint behind."""
    labels = _labels(series)
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.4 + 0.5 * len(labels)))
    _plot_paths(series, "ratio", ax)
    texts = texts[texts["path"].isin(_PATHS) & (texts["error"] > 0) & (texts["error_full"] > 0)]
    for row in texts.itertuples():
        ax.plot(row.ratio, _place(labels, row), "|", markeredgecolor=_PATHS[row.path]["color"], alpha=0.3, markersize=9)
    handles, faint = _path_handles(), {"alpha": 0.3, "linewidth": 9, "linestyle": "-"}
    if book is not None:
        own = series[["model", "dtype", "path"]]
        for row in own.merge(book[["dtype", "path", "ratio"]], on=["dtype", "path"]).itertuples():
            if row.path in _PATHS and pd.notna(row.ratio):
                at = [row.ratio.low, row.ratio.high], [_place(labels, row)] * 2
                ax.plot(*at, color=_PATHS[row.path]["color"], solid_capstyle="butt", **faint)
        handles.append(style.key("the book", **faint))
    ax.axvline(1, **style.REFERENCE)
    ax.set(xscale="log", xlabel="error / error without a cache\n(left of 1: closer to fp64)")
    ax.xaxis.set_minor_locator(plt.NullLocator())
    low, high = ax.get_xlim()
    ticks = next(ticks for most, ticks in _TICKS if high / low < most)
    ax.set_xticks(shown := [tick for tick in ticks if low <= tick <= high], [f"{tick:g}" for tick in shown])
    return style.with_legend(fig, handles, 3)


def figure_shared(layers: pd.DataFrame) -> plt.Figure:
    """Draw the correlation of the two paths' errors, and the drift over the error, against depth."""
    cached = layers[(layers["path"] == CACHED) & layers["correlation"].notna()]
    markers = dict(zip(dict.fromkeys(cached["model"]), itertools.cycle(style.MARKERS), strict=False))
    fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(style.WIDTH, 5.4))
    for (model, dtype), rows in cached.groupby(["model", "dtype"], sort=False):
        drawn = {"color": style.DTYPE_COLOURS[dtype], "marker": markers[model], "markersize": 3.5, "linewidth": 1}
        drawn |= {"linestyle": "-"}
        depth = layers.loc[layers["model"] == model, "layer"].max()
        top.plot(rows["layer"] / depth, rows["correlation"], **drawn)
        bottom.plot(rows["layer"] / depth, rows["apart"], **drawn)
    top.axhline(0, **style.REFERENCE)
    top.set(ylabel="correlation of the errors", ylim=(min(-0.05, cached["correlation"].min() - 0.05), 1.05))
    bottom.axhline(INDEPENDENT, **style.REFERENCE)
    style.note(bottom, "independent errors", (1, INDEPENDENT), (0, 4), ha="right")
    bottom.set(xlabel="depth (layer / layers; last: logits)", ylabel="drift / error", ylim=(0, 1.6))
    handles = style.dtype_keys(cached["dtype"])
    if len(markers) > 1:
        handles += [style.key(model.rpartition("/")[2], marker=marker) for model, marker in markers.items()]
    return style.with_legend(fig, handles, 6, columnspacing=1.2)


def figure_positions(positions: pd.DataFrame) -> plt.Figure:
    """Draw the first model's error along the text, in units of each dtype's unit roundoff."""
    first = positions[positions["model"] == positions["model"].iloc[0]]
    cached = first[(first["path"] == CACHED) & (first["error"] > 0) & (first["error_full"] > 0)]
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.3))
    for dtype, rows in cached.groupby("dtype", sort=False):
        _pair(ax, rows["position"], rows, dtype, UNIT_ROUNDOFF[dtype])
    ax.set(xlabel="position in the text (groups)", ylabel="relative error / unit roundoff", ylim=(0, None))
    return style.with_legend(fig, style.solid_and_dashed(cached["dtype"], "cached", "no cache"), 5)


def figure_shift(shift: pd.DataFrame) -> plt.Figure:
    """Draw what of the difference from the uncached pass has a direction."""
    fig, axes = plt.subplots(1, 3, sharey=True, figsize=(style.WIDTH, 1.6 + 0.36 * len(_labels(shift))))
    least = LEAST_EXPLAINED
    for ax, column, band, label in zip(
        axes, ("likelihood", "entropy", "common"), (least**0.5, least**0.5, least),
        ("log likelihood\n(mean / rms)", "entropy\n(mean / rms)", "in common\n(share)"), strict=True,
    ):
        ax.axvspan(-band, band, color=style.SKY, alpha=0.25, linewidth=0)
        ax.axvline(0, **style.REFERENCE)
        _plot_paths(shift, column, ax)
        ax.set_xlabel(label)
        reach = max(1.6 * band, *map(abs, ax.get_xlim()))
        ax.set_xlim(-reach, reach)
        ax.xaxis.set_major_locator(plt.MaxNLocator(3))
    return style.with_legend(fig, _path_handles(), 2)
