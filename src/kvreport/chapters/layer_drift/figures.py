"""Figures of the chapter on issue 25420.

Colour is the dtype; marker and line style tell whose numbers they are: filled and solid is this run, hollow and dashed
is what the document published.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm, ListedColormap

from kvbook.measuring import UNIT_ROUNDOFF
from kvreport.chapters.layer_drift import rows as named
from kvreport.chapters.layer_drift import tables
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES


def _drifting(rows: pd.DataFrame, column: str = "max_abs") -> pd.DataFrame:
    """Keep the hidden states that drift, for a logarithmic axis has no zero; the embedding's drift is one."""
    return rows[(rows["place"] == "hidden") & (rows["layer"] > 0) & (rows[column] > 0)].sort_values("layer")


def _drawn(*tables: pd.DataFrame) -> list[str]:
    """Name the dtypes that have a curve, for a legend's keys."""
    by_dtype = pd.concat(tables).groupby("dtype", sort=False)
    return [dtype for dtype, rows in by_dtype if len(_drifting(rows))]


def _line(ax: plt.Axes, x, y, dtype: str, published: bool, **more) -> None:
    colour = style.DTYPE_COLOURS[dtype]
    look = {"linestyle": "--", "markerfacecolor": "white"} if published else {"linestyle": "-"}
    ax.plot(x, y, color=colour, **{"marker": "o", "markersize": 3.5, "linewidth": 1.2} | look | more)


def _curves(ax: plt.Axes, rows: pd.DataFrame, published: bool = False, intervals: bool = False, **look) -> None:
    """Draw the largest absolute difference by layer, a curve for each dtype."""
    for dtype, series in rows.groupby("dtype"):
        shown = _drifting(series)
        _line(ax, shown["layer"], shown["max_abs"], dtype, published, **look)
        if intervals:
            low = shown["low"].where(shown["low"] > 0, shown["max_abs"])
            ax.fill_between(shown["layer"], low, shown["high"], color=style.DTYPE_COLOURS[dtype], alpha=0.2, lw=0)


def _panels(models: Sequence[str]) -> tuple[plt.Figure, dict[str, plt.Axes]]:
    """Make a panel for each model, one under the other, on one scale of values."""
    fig, axes = style.panels(len(models), 1, 0.7 + 2.9 * len(models), sharey=True)
    for ax, model in zip(axes[:, 0], models, strict=True):
        ax.set(yscale="log", xlabel="hidden state after layer", ylabel="largest absolute difference")
        ax.text(0.015, 0.97, model, transform=ax.transAxes, va="top", fontweight="bold")
        ax.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    return fig, dict(zip(models, axes[:, 0], strict=True))


def figure_absolute(means: pd.DataFrame, published: pd.DataFrame, models: list[dict[str, str]]) -> plt.Figure:
    """Draw the largest absolute difference by layer, each model of a run's record beside the document's of its kind."""
    fig, axes = _panels([model["name"] for model in models])
    families = {model["name"]: "gpt2" if model["architecture"] == "gpt2" else "llama" for model in models}
    for name, family in families.items():
        _curves(axes[name], means[means["model"] == name], intervals=True)
        _curves(axes[name], published[published["family"] == family], published=True)
    dtypes = _drawn(means, published[published["family"].isin(families.values())])
    # Above, not inside: where the curves run depends on the model.
    return style.with_legend(fig, style.solid_and_dashed(dtypes, "our run", "the issue"), 5)


def figure_against(means: pd.DataFrame, book: pd.DataFrame) -> plt.Figure:
    """Draw a run's drift by layer, a panel for each model; the published one stands faint behind it."""
    fig, axes = _panels(list(dict.fromkeys(means["model"])))
    faint = style.FAINT | {"marker": ""}
    for model, ax in axes.items():
        _curves(ax, book, **faint)
        _curves(ax, means[means["model"] == model])
    whose = [style.key("this machine", marker="o", linestyle="-"), style.key("the book", **faint | {"linestyle": "-"})]
    return style.with_legend(fig, [*style.dtype_keys(_drawn(means, book)), *whose], 5)


def plot_shape(means: pd.DataFrame, published: pd.DataFrame, ax: plt.Axes) -> None:
    """Draw every series over its own geometric mean against depth, so that only the shape is left.

    Layer 1, where drift begins, and the last one, after the final norm, are left out.
    """
    for rows, theirs in ((means, False), (published, True)):
        for marker, (_, of_model) in zip(style.MARKERS, rows.groupby("model", sort=False), strict=False):
            for dtype, series in of_model.groupby("dtype"):
                depth = series.loc[series["place"] == "hidden", "layer"].max()
                inner = _drifting(named.inner(series))
                if len(inner) > 2:
                    scale = np.exp(np.log(inner["max_abs"]).mean())
                    x, y = inner["layer"] / depth, inner["max_abs"] / scale
                    _line(ax, x, y, dtype, theirs, alpha=0.85, marker=marker)
    ax.set(yscale="log", xlabel="depth (layer / layers)", ylabel="drift / its geometric mean")
    ax.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
    ax.yaxis.set_minor_formatter(plt.NullFormatter())


def plot_relative(means: pd.DataFrame, ax: plt.Axes) -> None:
    """Draw the relative drift in units of the dtype's unit roundoff against depth, a marker for each model."""
    handles = []
    for index, (model, of_model) in enumerate(means.groupby("model", sort=False)):
        look = {"marker": style.MARKERS[index], "linestyle": ("-", ":")[index % 2]}
        handles.append(style.key(model.rpartition("/")[2], **look))
        for dtype, series in of_model.groupby("dtype"):
            shown = _drifting(series, "relative_rms")
            depth = series.loc[series["place"] == "hidden", "layer"].max()
            _line(ax, shown["layer"] / depth, shown["relative_rms"] / UNIT_ROUNDOFF[dtype], dtype, False, **look)
    ax.axhline(1, **style.REFERENCE)
    ax.set(yscale="log", xlabel="depth (layer / layers)", ylabel="relative drift / unit roundoff")
    ax.legend(handles=handles, loc="best", fontsize=9)


def figure_scale_free(means: pd.DataFrame, published: pd.DataFrame) -> plt.Figure:
    """Draw shape and relative drift, one under the other."""
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(style.WIDTH, 6.2))
    plot_shape(means, published, top)
    handles = style.solid_and_dashed(_drawn(means, published), "our run", "the issue")
    top.legend(handles=handles, fontsize=9, loc="lower right", ncols=2)
    plot_relative(means, bottom)
    return fig


def figure_laws(laws: pd.DataFrame) -> plt.Figure:
    """Draw growth per layer and ratios between dtypes, the document's and ours, from `tables.laws`."""
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


# Dark to light, so that a grey print tells them apart too.  After the first different token the two decode different
# texts, and an equal token means nothing.
_STATES = ("bits equal", "token equal", "first different token", "after it")
_STATE_COLOURS = (style.BLUE, style.SKY, style.VERMILION, "#e8e8e8")


def plot_greedy(greedy: pd.DataFrame, ax: plt.Axes) -> None:
    """Draw for every cached method and step whether bits or tokens equal those without a cache."""
    of = {method: own.set_index("step") for method, own in greedy.groupby("method")}
    uncached, methods = of[named.UNCACHED], named.METHODS[1:]
    grid = np.full((len(methods), len(uncached)), 3)
    for row, method in enumerate(methods):
        steps = of[method].index
        equal = {name: of[method][name] == uncached.loc[steps, name] for name in ("token", "logits_sha256")}
        states = np.select([~equal["token"], equal["logits_sha256"]], [2, 0], 1)
        end = states.argmax() + 1 if states.max() == 2 else len(states)
        grid[row, steps[:end]] = states[:end]
    norm = BoundaryNorm(range(5), 4)
    ax.pcolormesh(grid, cmap=ListedColormap(_STATE_COLOURS), norm=norm, edgecolors="white", linewidth=0.5)
    # "cache, " begins all labels but one; without it they can be larger.
    style.name_cells(ax, [method.removeprefix("cache, ") for method in methods], fontsize=9.5)


def figure_greedy(greedy: pd.DataFrame) -> plt.Figure:
    """Draw `plot_greedy` for every model and dtype, one under the other, of the first prompt."""
    groups = list(greedy[greedy["prompt"] == greedy["prompt"].iloc[0]].groupby(["model", "dtype"], sort=False))
    fig, axes = style.panels(len(groups), 1, 0.6 + 1.25 * len(groups), sharex=True)
    for ax, ((model, dtype), rows) in zip(axes[:, 0], groups, strict=True):
        plot_greedy(rows, ax)
        ax.set_title(f"{model.rpartition('/')[2]}, {DTYPES[dtype]}", loc="left", fontsize=10, pad=2)
    axes[-1, 0].set_xlabel("decoding step")
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="#444444", linewidth=0.5, label=state)
        for state, colour in zip(_STATES, _STATE_COLOURS, strict=True)
    ]
    return style.with_legend(fig, handles, 2, "upper right", fontsize=9.5)


def plot_mitigation(table: pd.DataFrame, column: str, ax: plt.Axes) -> None:
    """Draw one quantity of every mitigation over stock's, a row a mitigation."""
    variants, dtypes = (list(dict.fromkeys(table[name])) for name in ("variant", "dtype"))
    for row in table.itertuples():
        shift = dtypes.index(row.dtype)
        place = variants.index(row.variant) + 0.24 * (shift - (len(dtypes) - 1) / 2)
        look = {"color": style.DTYPE_COLOURS[row.dtype], "marker": style.MARKERS[shift]}
        style.plot_estimate(ax, getattr(row, column), place, **look)
    ax.axvline(1, **style.REFERENCE)
    style.name_rows(ax, variants)
    ax.set_xlim(left=min(0, ax.get_xlim()[0]))


def figure_mitigations(table: pd.DataFrame) -> plt.Figure:
    """Draw drift and time of a decode step under each mitigation, one under the other."""
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(style.WIDTH, 5.2))
    plot_mitigation(table, "drift_ratio", top)
    top.set_xlabel("relative drift of the logits / stock")
    plot_mitigation(table, "decode_ratio", bottom)
    bottom.set_xlabel("time of a decode step / stock")
    markers = dict(zip(dict.fromkeys(table["dtype"]), style.MARKERS, strict=False))
    top.legend(handles=style.dtype_keys(table["dtype"], markers), loc="best")
    return fig
