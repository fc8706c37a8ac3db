"""Figures of the chapter on which path is right.

Colour is the dtype, or where rows name the dtype, the path; filled is the cached path, hollow the uncached one.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvbook.measuring import agreement
from kvbook.measuring import estimates as fits
from kvreport.chapters.which_path_is_right import path_errors
from kvreport.chapters.which_path_is_right import tables as analysis
from kvreport.publishing import style
from kvreport.publishing.style import DTYPE_COLOURS
from kvreport.publishing.wording import DTYPES

_PATHS = {path_errors.CACHED: (style.BLUE, "o", True), path_errors.EAGER: (style.VERMILION, "s", False)}


def _dtype_handles(dtypes) -> list[Line2D]:
    return [Line2D([], [], color=DTYPE_COLOURS[d], linewidth=3, label=DTYPES[d]) for d in dict.fromkeys(dtypes)]


def _both_paths() -> list[Line2D]:
    return [
        Line2D([], [], color=style.GREY, marker="o", linestyle="-", label="cached"),
        Line2D([], [], color=style.GREY, marker="o", linestyle="--", markerfacecolor="white", label="no cache"),
    ]


def _pair(ax: Axes, x: pd.Series, rows: pd.DataFrame, dtype: str, unit: float = 1.0) -> None:
    drawn = {"color": DTYPE_COLOURS[dtype], "marker": "o", "linewidth": 1.2}
    ax.plot(x, rows["error_full"] / unit, linestyle="--", markersize=6, markerfacecolor="white", **drawn)
    ax.plot(x, rows["error"] / unit, linestyle="-", markersize=3, **drawn)


def plot_layers(layers: pd.DataFrame, ax: Axes) -> Axes:
    """Draw the error of both paths against the layer, on one model, with what the reference is worth far below."""
    # An error of zero, as behind most embeddings, has no place on a logarithmic axis.
    for dtype, rows in layers[layers["path"] == path_errors.CACHED].groupby("dtype", sort=False):
        drawn = rows[(rows["error"] > 0) & (rows["error_full"] > 0)]
        _pair(ax, drawn["layer"], drawn, dtype)
    for path, marker, label in (
        (path_errors.AS_LOADED, "x", "loaded in fp64"),
        (path_errors.CHECK, "+", "the reference's own two paths"),
    ):
        own = layers[(layers["path"] == path) & (layers["error"] > 0)]
        if own.empty:
            continue
        ax.plot(own["layer"], own["error"], color=style.BLACK, marker=marker, linestyle=":", linewidth=1)
        last = own.iloc[-1]
        ax.annotate(
            label, (last["layer"], last["error"]), xytext=(0, -12 if path == path_errors.AS_LOADED else 7),
            textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip
    ax.set(yscale="log", xlabel="hidden state after layer (last: logits)", ylabel="relative error")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def figure_layers(layers: pd.DataFrame) -> Figure:
    """Draw `plot_layers` for the first model."""
    first = layers[layers["model"] == layers["model"].iloc[0]]
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.2))
    plot_layers(first, ax)
    handles = _dtype_handles(first.loc[first["path"] == path_errors.CACHED, "dtype"]) + _both_paths()
    fig.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=9)
    return fig


def _labels(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["model"] + ", " + table["dtype"].map(DTYPES)))


def _plot_paths(
    table: pd.DataFrame, column: str, ax: Axes, form: str | None = None, write: Callable[[str], bool] = bool
) -> Axes:
    labels = _labels(table)
    for path, (colour, marker, filled) in _PATHS.items():
        for row in table[table["path"] == path].itertuples():
            estimate: fits.Estimate | None = getattr(row, column)
            if estimate is None or pd.isna(estimate):
                continue
            place = labels.index(f"{row.model}, {DTYPES[row.dtype]}") + (-0.14 if filled else 0.2)
            ax.errorbar(
                estimate.value, place, xerr=[[estimate.value - estimate.low], [estimate.high - estimate.value]],
                fmt=marker, color=colour, markerfacecolor=colour if filled else "white",
            )  # fmt: skip
            if form and write(path):
                ax.annotate(
                    form.format(estimate.value), (estimate.value, place), xytext=(0, 5), textcoords="offset points",
                    ha="center", fontsize=8.5, color=colour,
                )  # fmt: skip
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.7)
    ax.grid(axis="y", visible=False)
    return ax


def _path_handles() -> list[Line2D]:
    return [
        Line2D([], [], color=c, marker=m, linestyle="", markerfacecolor=c if filled else "white", label=path)
        for path, (c, m, filled) in _PATHS.items()
    ]


def figure_ratios(series: pd.DataFrame) -> Figure:
    """Draw each path's error over that of the uncached one."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.3 + 0.42 * len(_labels(series))))
    _plot_paths(series, "ratio", ax, "{:.2f}", lambda path: path == path_errors.CACHED)
    ax.axvline(1, color=style.GREY, linewidth=1, linestyle=":")
    ax.set(xscale="log", xlabel="error / error without a cache\n(left of 1: closer to the truth)")
    ticks = [0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 2, 2.8, 4]
    low, high = ax.get_xlim()
    shown = [t for t in ticks if low <= t <= high]
    # Narrow intervals show few of the coarse ticks, wide ones too many of the fine ones.
    shown = [t for t in shown if t not in (0.8, 0.9, 1.1, 1.2)] if len(shown) > 5 else shown
    ax.set_xticks(shown, [f"{t:g}" for t in shown])
    ax.xaxis.set_minor_locator(plt.NullLocator())
    fig.legend(handles=_path_handles(), loc="outside upper center", ncols=2, fontsize=9)
    return fig


def figure_shared(layers: pd.DataFrame) -> Figure:
    """Draw the correlation of the two paths' errors, and the drift over the error, against depth."""
    cached = layers[(layers["path"] == path_errors.CACHED) & layers["correlation"].notna()]
    models = list(dict.fromkeys(cached["model"]))
    fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(style.WIDTH, 5.4))
    for (model, dtype), rows in cached.groupby(["model", "dtype"], sort=False):
        drawn = {
            "color": DTYPE_COLOURS[dtype], "marker": style.MARKERS[models.index(model) % len(style.MARKERS)],
            "markersize": 3.5, "linewidth": 1, "linestyle": "-",
        }  # fmt: skip
        depth = layers.loc[layers["model"] == model, "layer"].max()
        top.plot(rows["layer"] / depth, rows["correlation"], **drawn)
        bottom.plot(rows["layer"] / depth, rows["apart"], **drawn)
    top.axhline(0, color=style.GREY, linewidth=1, linestyle=":")
    top.set(ylabel="correlation of the errors", ylim=(min(-0.05, cached["correlation"].min() - 0.05), 1.05))
    bottom.axhline(analysis.INDEPENDENT, color=style.GREY, linewidth=1, linestyle=":")
    bottom.annotate(
        "nothing in common", (1, analysis.INDEPENDENT), xytext=(0, 4), textcoords="offset points", ha="right",
        fontsize=9, color=style.GREY,
    )  # fmt: skip
    bottom.set(xlabel="depth (layer / layers; last: logits)", ylabel="drift / error", ylim=(0, 1.6))
    handles = _dtype_handles(cached["dtype"]) + [
        Line2D([], [], color=style.GREY, marker=style.MARKERS[i % len(style.MARKERS)], linestyle="", label=model)
        for i, model in enumerate(models)
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=6, fontsize=9, columnspacing=1.2)
    return fig


def figure_positions(positions: pd.DataFrame) -> Figure:
    """Draw the first model's error along the text, in units of each dtype's unit roundoff."""
    first = positions[positions["model"] == positions["model"].iloc[0]]
    cached = first[(first["path"] == path_errors.CACHED) & (first["error"] > 0) & (first["error_full"] > 0)]
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.3))
    for dtype, rows in cached.groupby("dtype", sort=False):
        _pair(ax, rows["position"], rows, dtype, agreement.UNIT_ROUNDOFF[dtype])
    ax.set(xlabel="position in the text (groups)", ylabel="relative error / unit roundoff", ylim=(0, None))
    fig.legend(handles=_dtype_handles(cached["dtype"]) + _both_paths(), loc="outside upper center", ncols=5, fontsize=9)
    return fig


def figure_shift(shift: pd.DataFrame, least_explained: float) -> Figure:
    """Draw what of the difference from the uncached pass has a direction."""
    fig, axes = plt.subplots(1, 3, sharey=True, figsize=(style.WIDTH, 1.6 + 0.36 * len(_labels(shift))))
    bound = least_explained**0.5
    for ax, column, band, label in zip(
        axes, ("likelihood", "entropy", "common"), (bound, bound, least_explained),
        ("log likelihood\n(mean / rms)", "entropy\n(mean / rms)", "in common\n(share)"), strict=True,
    ):  # fmt: skip
        ax.axvspan(-band, band, color=style.SKY, alpha=0.25, linewidth=0)
        ax.axvline(0, color=style.GREY, linewidth=1, linestyle=":")
        _plot_paths(shift, column, ax)
        ax.set_xlabel(label)
        reach = max(1.6 * band, *map(abs, ax.get_xlim()))
        ax.set_xlim(-reach, reach)
        ax.xaxis.set_major_locator(MaxNLocator(3))
    fig.legend(handles=_path_handles(), loc="outside upper center", ncols=2, fontsize=9)
    return fig
