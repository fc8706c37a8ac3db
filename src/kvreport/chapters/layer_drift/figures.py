"""Figures of the chapter on issue 25420.

Colour is the dtype; marker and line style tell whose numbers they are: filled and solid is this run, hollow and dashed
is what the document published.
"""

from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from kvbook.measuring import estimates
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.layer_drift import rows as named
from kvreport.chapters.layer_drift import tables
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES


def _hidden(rows: pd.DataFrame) -> pd.DataFrame:
    # The embedding drifts by exactly zero, which a logarithmic axis cannot hold.
    return rows[(rows["place"] == "hidden") & (rows["layer"] > 0)].sort_values("layer")


def _whose(place: Axes | Figure, dtypes: Iterable[str], **where) -> None:
    """Say what colour and marker mean."""
    handles = [
        Line2D([], [], color=style.DTYPE_COLOURS[d], linewidth=3, label=DTYPES[d]) for d in dict.fromkeys(dtypes)
    ]
    handles += [
        Line2D([], [], color=style.GREY, marker="o", linestyle="-", label="our run"),
        Line2D([], [], color=style.GREY, marker="o", linestyle="--", markerfacecolor="white", label="the issue"),
    ]
    place.legend(handles=handles, fontsize=9, **where)


def _line(ax: Axes, x, y, dtype: str, published: bool, **more) -> None:
    more = {"marker": "o", "markersize": 3.5, "linewidth": 1.2} | more
    ax.plot(
        x, y, color=style.DTYPE_COLOURS[dtype], linestyle="--" if published else "-",
        markerfacecolor="white" if published else style.DTYPE_COLOURS[dtype], **more,
    )


def plot_absolute(means: pd.DataFrame, published: pd.DataFrame, ax: Axes) -> Axes:
    """Draw the largest absolute difference against the layer, one model of ours beside the document's of its kind."""
    for rows, theirs in ((means, False), (published, True)):
        for dtype, series in rows.groupby("dtype"):
            hidden = _hidden(series)
            hidden = hidden[hidden["max_abs"] > 0]
            if hidden.empty:
                continue
            _line(ax, hidden["layer"], hidden["max_abs"], dtype, theirs)
            if not theirs:
                low = hidden["low"].where(hidden["low"] > 0, hidden["max_abs"])
                ax.fill_between(
                    hidden["layer"], low, hidden["high"], color=style.DTYPE_COLOURS[dtype], alpha=0.2, linewidth=0
                )
    ax.set(yscale="log", xlabel="hidden state after layer", ylabel="largest absolute difference")
    return ax


def figure_absolute(means: pd.DataFrame, published: pd.DataFrame, models: list[dict[str, Any]]) -> Figure:
    """Draw `plot_absolute` for each model of a run's record, one under the other, on one scale of values."""
    fig, axes = plt.subplots(len(models), 1, sharey=True, squeeze=False, figsize=(style.WIDTH, 0.7 + 2.9 * len(models)))
    for ax, model in zip(axes[:, 0], models, strict=True):
        family = "gpt2" if model["architecture"] == "gpt2" else "llama"
        plot_absolute(means[means["model"] == model["name"]], published[published["family"] == family], ax)
        ax.text(0.015, 0.97, model["name"], transform=ax.transAxes, va="top", fontweight="bold")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Above, not inside: where the curves run depends on the model.
    _whose(fig, means["dtype"], loc="outside upper center", ncols=5)
    return fig


def figure_against(means: pd.DataFrame, book: pd.DataFrame) -> Figure:
    """Draw a run's drift by layer, a panel for each model; the published one stands faint behind it."""
    models = list(dict.fromkeys(means["model"]))
    fig, axes = plt.subplots(len(models), 1, sharey=True, squeeze=False, figsize=(style.WIDTH, 0.7 + 2.9 * len(models)))
    for ax, model in zip(axes[:, 0], models, strict=True):
        for rows, faint in ((book, True), (means[means["model"] == model], False)):
            for dtype, series in rows.groupby("dtype"):
                hidden = _hidden(series)
                hidden = hidden[hidden["max_abs"] > 0]
                look = {"linewidth": 5, "alpha": 0.3, "marker": ""} if faint else {}
                if len(hidden):
                    _line(ax, hidden["layer"], hidden["max_abs"], dtype, False, **look)
        ax.set(yscale="log", xlabel="hidden state after layer", ylabel="largest absolute difference")
        ax.text(0.015, 0.97, model, transform=ax.transAxes, va="top", fontweight="bold")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = [
        Line2D([], [], color=style.DTYPE_COLOURS[d], linewidth=3, label=DTYPES[d])
        for d in dict.fromkeys(means["dtype"])
    ]
    handles += [
        Line2D([], [], color=style.GREY, marker="o", label="this machine"),
        Line2D([], [], color=style.GREY, linewidth=5, alpha=0.3, label="the book"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=9)
    return fig


def plot_shape(means: pd.DataFrame, published: pd.DataFrame, ax: Axes) -> Axes:
    """Draw every series over its own geometric mean against depth, so that only the shape is left.

    Layer 1, where drift begins, and the last one, after the final norm, are left out.

    Parameters and the axes as for `plot_absolute`; all models and families may be in the tables.
    """
    for rows, theirs in ((means, False), (published, True)):
        for index, (_, of_model) in enumerate(rows.groupby("model", sort=False)):
            for dtype, series in of_model.groupby("dtype"):
                hidden = _hidden(series)
                depth = hidden["layer"].max()
                inner = hidden[(hidden["layer"] >= 2) & (hidden["layer"] < depth) & (hidden["max_abs"] > 0)]
                if len(inner) > 2:
                    scale = np.exp(np.log(inner["max_abs"]).mean())
                    _line(
                        ax, inner["layer"] / depth, inner["max_abs"] / scale, dtype, theirs, alpha=0.85,
                        marker=style.MARKERS[index],
                    )
    ax.set(yscale="log", xlabel="depth (layer / layers)", ylabel="drift / its geometric mean")
    ax.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
    ax.yaxis.set_minor_formatter(NullFormatter())
    return ax


def plot_relative(means: pd.DataFrame, ax: Axes) -> Axes:
    """Draw the relative drift in units of the dtype's unit roundoff against depth, from `tables.layer_means`."""
    for model_index, (_, of_model) in enumerate(means.groupby("model", sort=False)):
        for dtype, series in of_model.groupby("dtype"):
            hidden = _hidden(series)
            hidden = hidden[hidden["relative_rms"] > 0]
            if hidden.empty:
                continue
            ax.plot(
                hidden["layer"] / series.loc[series["place"] == "hidden", "layer"].max(),
                hidden["relative_rms"] / UNIT_ROUNDOFF[dtype], color=style.DTYPE_COLOURS[dtype],
                marker=style.MARKERS[model_index], markersize=3.5, linewidth=1.2, linestyle=("-", ":")[model_index % 2],
            )
    ax.axhline(1, color=style.GREY, linewidth=1, linestyle=":")
    ax.set(yscale="log", xlabel="depth (layer / layers)", ylabel="relative drift / unit roundoff")
    return ax


def figure_scale_free(means: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Draw shape and relative drift, one under the other."""
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(style.WIDTH, 6.2))
    plot_shape(means, published, top)
    _whose(top, means["dtype"], loc="lower right", ncols=2)
    plot_relative(means, bottom)
    handles = [
        Line2D([], [], color=style.GREY, marker=style.MARKERS[i], linestyle=("-", ":")[i % 2], label=model)
        for i, model in enumerate(dict.fromkeys(means["model"]))
    ]
    bottom.legend(handles=handles, loc="best", fontsize=9)
    return fig


def figure_laws(laws: pd.DataFrame) -> Figure:
    """Draw growth a layer and ratios between dtypes, the document's and ours, from `tables.laws_table`."""
    growth, ratios = (laws[laws["quantity"] == quantity] for quantity in (tables.GROWTH, tables.RATIO))
    fig, (top, bottom) = plt.subplots(
        2, 1, figsize=(style.WIDTH, 1.8 + 0.36 * len(laws)), height_ratios=[len(growth) + 1, len(ratios) + 1]
    )
    style.plot_estimates(growth, top, reference=0.0, form="{:+.1%}")
    top.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    top.set_xlabel(tables.GROWTH)
    style.plot_estimates(ratios, bottom, reference=1.0, form="{:.2f}")
    bottom.set_xlim(left=0)
    # From the right edge to the left, where there is room below the names.
    bottom.set_xlabel(tables.RATIO, loc="right")
    return fig


# Dark to light, so that a grey print tells them apart too.  Behind the first different token the two decode different
# texts, and an equal token means nothing.
_STATES = ("bits equal", "token equal", "first different token", "after it")
_STATE_COLOURS = (style.BLUE, style.SKY, style.VERMILION, "#e8e8e8")


def plot_greedy(greedy: pd.DataFrame, ax: Axes) -> Axes:
    """Draw for every cached method and step whether bits or tokens equal those without a cache."""
    uncached = greedy[greedy["method"] == named.UNCACHED].set_index("step")
    methods = named.METHODS[1:]
    grid = np.full((len(methods), len(uncached)), 3)
    for row, method in enumerate(methods):
        own = greedy[greedy["method"] == method].set_index("step")
        for step in own.index:
            if own.loc[step, "token"] != uncached.loc[step, "token"]:
                grid[row, step] = 2
                break
            grid[row, step] = 0 if own.loc[step, "logits_sha256"] == uncached.loc[step, "logits_sha256"] else 1
    ax.pcolormesh(
        grid, cmap=ListedColormap(_STATE_COLOURS), norm=BoundaryNorm(range(5), 4), edgecolors="white", linewidth=0.5
    )
    # "cache, " begins all labels but one; without it they can be larger.
    ax.set_yticks(np.arange(len(methods)) + 0.5, [method.removeprefix("cache, ") for method in methods], fontsize=9.5)
    ax.invert_yaxis()
    ax.grid(visible=False)
    return ax


def figure_greedy(greedy: pd.DataFrame) -> Figure:
    """Draw `plot_greedy` for every model and dtype, one under the other, of the first prompt."""
    greedy = greedy[greedy["prompt"] == greedy["prompt"].iloc[0]]
    groups = list(greedy.groupby(["model", "dtype"], sort=False))
    fig, axes = plt.subplots(
        len(groups), 1, sharex=True, squeeze=False, figsize=(style.WIDTH, 0.6 + 1.25 * len(groups))
    )
    for ax, ((model, dtype), rows) in zip(axes[:, 0], groups, strict=True):
        plot_greedy(rows, ax)
        ax.set_title(f"{model}, {DTYPES[dtype]}", loc="left", fontsize=10, pad=2)
    axes[-1, 0].set_xlabel("decoding step")
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=c, edgecolor="#444444", linewidth=0.5, label=s)
        for s, c in zip(_STATES, _STATE_COLOURS, strict=True)
    ]
    fig.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=9.5)
    return fig


def plot_mitigation(table: pd.DataFrame, column: str, ax: Axes) -> Axes:
    """Draw one quantity of every mitigation over stock's, a row a mitigation."""
    variants = list(dict.fromkeys(table["variant"]))
    dtypes = list(dict.fromkeys(table["dtype"]))
    for shift, (dtype, marker) in enumerate(zip(dtypes, style.MARKERS, strict=False)):
        for row in table[table["dtype"] == dtype].itertuples():
            estimate: estimates.Estimate = getattr(row, column)
            ax.errorbar(
                estimate.value, variants.index(row.variant) + 0.24 * (shift - (len(dtypes) - 1) / 2),
                xerr=[[estimate.value - estimate.low], [estimate.high - estimate.value]],
                color=style.DTYPE_COLOURS[dtype], fmt=marker, label=DTYPES[dtype],
            )
    ax.axvline(1, color=style.GREY, linewidth=1, linestyle=":")
    ax.set_yticks(range(len(variants)), variants)
    ax.set_ylim(len(variants) - 0.4, -0.6)
    ax.set_xlim(left=min(0, ax.get_xlim()[0]))
    ax.grid(axis="y", visible=False)
    return ax


def figure_mitigations(table: pd.DataFrame) -> Figure:
    """Draw drift and time of a decode step under each mitigation, one under the other."""
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(style.WIDTH, 5.2))
    plot_mitigation(table, "drift_ratio", top).set_xlabel("relative drift of the logits / stock")
    plot_mitigation(table, "decode_ratio", bottom).set_xlabel("time of a decode step / stock")
    handles = [
        Line2D([], [], color=style.DTYPE_COLOURS[d], marker=m, linestyle="", label=DTYPES[d])
        for d, m in zip(dict.fromkeys(table["dtype"]), style.MARKERS, strict=False)
    ]
    top.legend(handles=handles, loc="best")
    return fig
