"""Figures of the chapter on bug or rounding."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from kvbook.diagnosis import verdict
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.bug_or_rounding import first_bad_layer, reported, symptoms, tables
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

# Colour, marker and line say the group thrice.
_CLEAN, _BUG, _NARROW = "clean", "injected bug", first_bad_layer.NARROW
_LOOKS = {
    _CLEAN: (style.BLUE, "o", "-"),
    _BUG: (style.VERMILION, "s", "--"),
    _NARROW: (style.PURPLE, "^", "-."),
}
_KINDS = {"rounding": style.BLUE, "exact": style.GREEN, "bug": style.VERMILION, "undecided": style.PURPLE}
FOUND_HEADING = "in no document"
# Lines run through labels otherwise.
_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}


def _dtypes(rows: pd.DataFrame) -> list[str]:
    return [dtype for dtype in UNIT_ROUNDOFF if dtype in set(rows["dtype"])]


def _frame(ax: Axes, dtypes: list[str]) -> None:
    """Prepare log-log axes: a tick for each dtype, the line of one roundoff, and the most that rounding can be."""
    roundoffs = np.array([UNIT_ROUNDOFF[dtype] for dtype in dtypes])
    ax.set(xscale="log", yscale="log", xlabel="unit roundoff", ylabel="drift / spread of the logits")
    ax.plot(roundoffs, roundoffs, color=style.GREY, linestyle=":", linewidth=1)
    _note(ax, "one roundoff", roundoffs, roundoffs, (8, -16), "left")
    fine = roundoffs[roundoffs * verdict.LIMIT < 1]
    if len(fine):
        ax.plot(fine, fine * verdict.LIMIT, color=style.GREY, linestyle=":", linewidth=1)
        _note(ax, "most that\nrounding can be", fine, fine * verdict.LIMIT, (-4, 4), "right")
    # fp16 and bf16 lie too close for two labels on one line.
    names = [("\n" if dtype == "bfloat16" else "") + DTYPES[dtype] for dtype in dtypes]
    ax.set_xticks(roundoffs, names)
    ax.minorticks_off()


def _note(ax: Axes, text: str, x: np.ndarray, y: np.ndarray, shift: tuple[float, float], side: str) -> None:
    """Write beside the middle of a line on logarithmic axes."""
    middle = tuple(np.sqrt(ends.min() * ends.max()) for ends in (x, y))
    ax.annotate(text, middle, shift, textcoords="offset points", ha=side, color=style.GREY, fontsize=9)


def _group(symptom: str) -> str:
    return {symptoms.CLEAN: _CLEAN, first_bad_layer.NARROW: _NARROW}.get(symptom, _BUG)


def _draw(ax: Axes, lines: pd.DataFrame, **look) -> None:
    for (symptom, _), line in lines.groupby(["symptom", "model"], sort=False):
        colour, marker, dash = _LOOKS[_group(symptom)]
        # A logarithmic axis has no place for a drift of zero, nor for an overflow.
        shown = line[(line["drift"] > 0) & np.isfinite(line["drift"])]
        ax.plot(shown["roundoff"], shown["drift"], **{"color": colour, "marker": marker, "linestyle": dash} | look)


_STRONG = {"linewidth": 1.8, "markersize": 5}
_THIN = {"linewidth": 0.8, "markersize": 2.5, "alpha": 0.4}
_FAINT = {"linewidth": 6, "alpha": 0.18, "marker": "", "linestyle": "-"}


def figure_planted(lines: pd.DataFrame, model: str) -> Figure:
    """Draw drift against unit roundoff, of clean families and of injected bugs, one model boldly."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.2))
    _frame(ax, _dtypes(lines))
    _draw(ax, lines[lines["model"] != model], **_THIN)
    _draw(ax, lines[lines["model"] == model], **_STRONG)
    handles = _groups()
    handles += [Line2D([], [], color=style.GREY, linewidth=_STRONG["linewidth"], label=model)]
    if set(lines["model"]) != {model}:
        handles += [Line2D([], [], color=style.GREY, linewidth=_THIN["linewidth"], alpha=0.6, label="other families")]
    fig.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=9.5)
    return fig


def figure_against(lines: pd.DataFrame, book: pd.DataFrame, model: str) -> Figure:
    """Draw this machine's drift over the published one of the book's first model."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.2))
    _frame(ax, _dtypes(pd.concat([lines, book])))
    _draw(ax, book[book["model"] == model], **_FAINT)
    _draw(ax, lines, **_THIN | {"alpha": 0.9})
    handles = [
        *_groups(),
        Line2D([], [], color=style.GREY, linewidth=0.8, marker=".", label="this machine"),
        Line2D([], [], color=style.GREY, linewidth=6, alpha=0.3, label="the book"),
    ]
    fig.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=9.5)
    return fig


def _groups() -> list[Line2D]:
    return [
        Line2D([], [], color=colour, marker=marker, linestyle=dash, label=name)
        for name, (colour, marker, dash) in _LOOKS.items()
    ]


def figure_symptoms(lines: pd.DataFrame, table: pd.DataFrame) -> Figure:
    """Draw every symptom of the documents on a line of its own: its drift in each dtype, and what it was called."""
    rows = _with_headings(table)
    dtypes = _dtypes(lines)
    fig, ax = plt.subplots(figsize=(style.WIDTH, 1.1 + 0.235 * len(rows)))
    # Left of everything, where a logarithmic axis has no place for zero.
    zero = UNIT_ROUNDOFF[dtypes[0]] / 100
    for place, row in enumerate(rows):
        if isinstance(row, str):
            continue
        line = lines[(lines["symptom"] == row["symptom"]) & (lines["model"] == row["model"])]
        points = line[np.isfinite(line["drift"])].assign(x=line["drift"].clip(lower=zero))
        between = points.loc[points["drift"] > 0, "x"]
        if len(between):
            ax.hlines(place, between.min(), between.max(), color="#bbbbbb", linewidth=1, zorder=1)
        for point in points.itertuples():
            colour = style.DTYPE_COLOURS[point.dtype]
            # One above the other, so that marks at one place can all be seen.
            shift = 0.13 * (dtypes.index(point.dtype) - (len(dtypes) - 1) / 2)
            ax.plot(
                point.x, place + shift, color=colour, marker=_markers(dtypes)[point.dtype], linestyle="", markersize=5,
                markerfacecolor="white" if point.drift == 0 else colour, alpha=0.9,
            )
        ax.annotate(
            row["kind"], (1.01, place), xycoords=ax.get_yaxis_transform(), color=_KINDS[row["kind"]], fontsize=9,
            va="center", annotation_clip=False,
        )
    ax.set_xscale("log")
    ax.set_xlim(zero / 4, 20)
    ticks = [10.0**power for power in range(-16, 1, 4) if 10.0**power > 5 * zero]
    ax.set_xticks([zero, *ticks], ["0", *(f"$10^{{{round(np.log10(tick))}}}$" for tick in ticks)])
    ax.minorticks_off()
    ax.set_xlabel("drift / spread of the logits")
    ax.set_yticks(range(len(rows)), [row if isinstance(row, str) else tables.named(row["symptom"]) for row in rows])
    for label, row in zip(ax.get_yticklabels(), rows, strict=True):
        label.set_fontsize(9)
        if isinstance(row, str):
            label.set_fontweight("bold")
        elif row["whose"] == reported.REMOVED:
            label.set_color(style.GREY)
            label.set_fontstyle("italic")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=style.DTYPE_COLOURS[d], marker=_markers(dtypes)[d], linestyle="", label=DTYPES[d])
        for d in dtypes
    ]
    fig.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9.5)
    return fig


def _markers(dtypes: list[str]) -> dict[str, str]:
    return dict(zip(dtypes, style.MARKERS, strict=False))


def _with_headings(table: pd.DataFrame) -> list:
    rows: list = []
    headings = table["document"].mask(table["whose"] == reported.FOUND, FOUND_HEADING)
    for heading, part in table.groupby(headings, sort=False):
        rows += [str(heading), *part.to_dict("records")]
    return rows


def figure_layers(table: pd.DataFrame) -> Figure:
    """Draw the drift after every layer in the finest and in the coarsest dtype, clean and with a bug in one layer."""
    dtypes = _dtypes(table)
    shown = list(dict.fromkeys((dtypes[0], dtypes[-1])))
    fig, axes = plt.subplots(len(shown), 1, sharex=True, squeeze=False, figsize=(style.WIDTH, 0.8 + 2.1 * len(shown)))
    looks = {
        first_bad_layer.CLEAN: (style.BLUE, "o", "-"),
        first_bad_layer.LATE: (style.VERMILION, "s", "--"),
        first_bad_layer.NARROW: (style.PURPLE, "^", "-."),
    }
    for ax, dtype in zip(axes[:, 0], shown, strict=True):
        part = table[(table["dtype"] == dtype) & (table["drift"] > 0)]
        for bug, (colour, marker, dash) in looks.items():
            line = part[part["bug"] == bug]
            # Hollow and of growing size, so that lines which coincide can all be seen.
            ax.plot(
                line["layer"], line["drift"], color=colour, marker=marker, linestyle=dash, label=bug, linewidth=1.2,
                markerfacecolor="none", markersize=3.5 + 2 * list(looks).index(bug),
            )
        if (most := UNIT_ROUNDOFF[dtype] * verdict.LIMIT) < 1:
            ax.axhline(most, color=style.GREY, linestyle=":", linewidth=1)
            ax.annotate(
                "most that rounding can be", (0.01, most), (0, 4), xycoords=ax.get_yaxis_transform(),
                textcoords="offset points", color=style.GREY, fontsize=9, bbox=_ON_WHITE,
            )
        ax.set(yscale="log", ylabel=f"relative drift, {DTYPES[dtype]}")
        # Whole decades, so that both ends have a label.
        low, high = np.log10(ax.get_ylim())
        ax.set_ylim(10.0 ** np.floor(low), 10.0 ** np.ceil(high))
        ax.yaxis.set_minor_formatter(NullFormatter())
    axes[-1, 0].set_xlabel("hidden state after layer")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=9.5)
    return fig
