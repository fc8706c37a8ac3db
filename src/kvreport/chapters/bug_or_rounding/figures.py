"""Figures of the chapter on bug or rounding."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from kvbook.diagnosis import verdict
from kvbook.measuring import UNIT_ROUNDOFF
from kvreport.chapters.bug_or_rounding import rows
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

# Colour, marker and line say the group thrice.
_LOOKS = {
    rows.CLEAN: {"color": style.BLUE, "marker": "o", "linestyle": "-"},
    "injected bug": {"color": style.VERMILION, "marker": "s", "linestyle": "--"},
    rows.NARROW: {"color": style.PURPLE, "marker": "^", "linestyle": "-."},
}
_KINDS = {"rounding": style.BLUE, "exact": style.GREEN, "bug": style.VERMILION, "undecided": style.PURPLE}
FOUND_HEADING = "in no document"


def _dtypes(table: pd.DataFrame) -> list[str]:
    return [dtype for dtype in UNIT_ROUNDOFF if dtype in set(table["dtype"])]


def _look(symptom: str) -> dict[str, str]:
    return _LOOKS.get(symptom, _LOOKS["injected bug"])


def _against_roundoff(dtypes: list[str], whose: dict[str, dict]) -> tuple[plt.Figure, plt.Axes]:
    """Prepare log-log axes: a tick for each dtype, the line of one roundoff, and the most that rounding can be."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.2))
    roundoffs = np.array([UNIT_ROUNDOFF[dtype] for dtype in dtypes])
    ax.set(xscale="log", yscale="log", xlabel="unit roundoff", ylabel="drift / spread of the logits")
    fine = roundoffs[roundoffs * verdict.LIMIT < 1]
    for x, factor, text, shift, side in (
        (roundoffs, 1, "one roundoff", (8, -16), "left"),
        (fine, verdict.LIMIT, "most that\nrounding can be", (-4, 4), "right"),
    ):
        if len(x) > 1:
            ax.plot(x, x * factor, **style.REFERENCE)
            # Beside the middle of the line, which on these axes is the geometric one.
            middle = np.sqrt(x.min() * x.max())
            style.note(ax, text, (middle, middle * factor), shift, ha=side)
    # fp16 and bf16 lie too close for two labels on one line.
    ax.set_xticks(roundoffs, [("\n" if dtype == "bfloat16" else "") + DTYPES[dtype] for dtype in dtypes])
    ax.minorticks_off()
    handles = [plt.Line2D([], [], label=of, **{"color": style.GREY} | look) for of, look in (_LOOKS | whose).items()]
    return style.with_legend(fig, handles, 3, "upper left", fontsize=9.5), ax


def _draw(ax: plt.Axes, lines: pd.DataFrame, **look) -> None:
    for (symptom, _), line in lines.groupby(["symptom", "model"], sort=False):
        # A logarithmic axis has no place for a drift of zero, nor for an overflow.
        shown = line[(line["drift"] > 0) & np.isfinite(line["drift"])]
        ax.plot(shown["roundoff"], shown["drift"], **_look(symptom) | look)


def figure_injected(lines: pd.DataFrame, model: str) -> plt.Figure:
    """Draw drift against unit roundoff: clean families, one model boldly, and the range of all injected bugs."""
    others = {"thin: others": {"linewidth": 0.8}} if set(lines["model"]) != {model} else {}
    fig, ax = _against_roundoff(_dtypes(lines), {f"thick: {model}": {"linewidth": 3}} | others)
    is_bug = ~lines["symptom"].isin(_LOOKS)
    # One by one, dozens of flat lines would merge.
    bugs = lines[is_bug & (lines["drift"] > 0) & np.isfinite(lines["drift"])].groupby("roundoff")["drift"]
    look = _LOOKS["injected bug"]
    for edge in (bugs.min(), bugs.max()):
        ax.plot(edge.index, edge, **look, markersize=4)
    ax.fill_between(bugs.min().index, bugs.min(), bugs.max(), color=look["color"], alpha=0.2, linewidth=0)
    is_bold = lines["model"] == model
    _draw(ax, lines[~is_bug & ~is_bold], linewidth=0.8, markersize=2.5, alpha=0.6)
    _draw(ax, lines[~is_bug & is_bold], linewidth=2.5, markersize=5)
    return fig


def figure_against(lines: pd.DataFrame, book: pd.DataFrame, model: str) -> plt.Figure:
    """Draw this machine's drift over the published one of the book's first model."""
    whose = {"this machine": {"linewidth": 0.8, "marker": "."}, "the book": {"linewidth": 6, "alpha": 0.3}}
    fig, ax = _against_roundoff(_dtypes(pd.concat([lines, book])), whose)
    _draw(ax, book[book["model"] == model], linewidth=6, alpha=0.18, marker="", linestyle="-")
    _draw(ax, lines, linewidth=0.8, markersize=2.5, alpha=0.9)
    return fig


def figure_symptoms(lines: pd.DataFrame, table: pd.DataFrame) -> plt.Figure:
    """Draw every symptom of the documents on a line of its own: its drift in each dtype, and what it was called."""
    places: list[dict] = []
    headings = table["document"].mask(table["whose"] == rows.FOUND, FOUND_HEADING)
    for heading, part in table.groupby(headings, sort=False):
        places += [{"label": heading}, *part.assign(label=part["symptom"].map(rows.named)).to_dict("records")]
    dtypes = _dtypes(lines)
    markers = dict(zip(dtypes, style.MARKERS, strict=False))
    fig, ax = style.rows([row["label"] for row in places], 1.1, 0.25, fontsize=10)
    # Left of everything, where a logarithmic axis has no place for zero.
    zero = UNIT_ROUNDOFF[dtypes[0]] / 100
    for place, (row, label) in enumerate(zip(places, ax.get_yticklabels(), strict=True)):
        if "symptom" not in row:
            label.set_fontweight("bold")
            continue
        if row["whose"] == rows.REMOVED:
            label.set(color=style.GREY, fontstyle="italic")
        line = lines[(lines["symptom"] == row["symptom"]) & (lines["model"] == row["model"])]
        points = line[np.isfinite(line["drift"])].assign(x=line["drift"].clip(lower=zero))
        between = points.loc[points["drift"] > 0, "x"]
        ax.plot(between, [place] * len(between), color="#bbbbbb", linewidth=1, linestyle="-", zorder=1)
        for point in points.itertuples():
            # One above the other, so that marks at one place can all be seen.
            shift, colour = 0.13 * (dtypes.index(point.dtype) - (len(dtypes) - 1) / 2), style.DTYPE_COLOURS[point.dtype]
            ax.plot(
                point.x, place + shift, color=colour, marker=markers[point.dtype], linestyle="", markersize=5,
                markerfacecolor="white" if point.drift == 0 else colour, alpha=0.9,
            )
        ax.annotate(
            row["kind"], (1.01, place), xycoords=ax.get_yaxis_transform(), color=_KINDS[row["kind"]], fontsize=9,
            va="center", annotation_clip=False,
        )
    ax.set(xscale="log", xlim=(zero / 4, 20), xlabel="drift / spread of the logits")
    powers = [power for power in range(-16, 1, 4) if 10.0**power > 100 * zero]
    ax.set_xticks([zero, *(10.0**power for power in powers)], ["0", *(f"$10^{{{power}}}$" for power in powers)])
    ax.minorticks_off()
    ax.tick_params(axis="y", length=0)
    handles = style.dtype_keys(dtypes, markers)
    return style.with_legend(fig, handles, len(handles), "upper right", fontsize=9.5)


def figure_layers(table: pd.DataFrame) -> plt.Figure:
    """Draw the drift after every layer in the finest and in the coarsest dtype, clean and with a bug in one layer."""
    dtypes = _dtypes(table)
    shown = list(dict.fromkeys((dtypes[0], dtypes[-1])))
    fig, axes = style.panels(len(shown), 1, 0.8 + 2.1 * len(shown), sharex=True)
    for ax, dtype in zip(axes[:, 0], shown, strict=True):
        part = table[(table["dtype"] == dtype) & (table["drift"] > 0)]
        for place, bug in enumerate((rows.CLEAN, rows.LATE, rows.NARROW)):
            line = part[part["bug"] == bug]
            # Hollow and of growing size, so that lines which coincide can all be seen.
            look = _look(bug) | {"linewidth": 1.2, "markerfacecolor": "none", "markersize": 3.5 + 2 * place}
            ax.plot(line["layer"], line["drift"], label=bug, **look)
        if (most := UNIT_ROUNDOFF[dtype] * verdict.LIMIT) < 1:
            ax.axhline(most, **style.REFERENCE)
            # Lines run through the label otherwise.
            on_white = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}
            left = {"xycoords": ax.get_yaxis_transform(), "bbox": on_white}
            style.note(ax, "most that rounding can be", (0.01, most), (0, 4), **left)
        ax.set(yscale="log", ylabel=f"relative drift, {DTYPES[dtype]}")
        # Whole decades, so that both ends have a label.
        low, high = np.log10(ax.get_ylim())
        ax.set_ylim(10.0 ** np.floor(low), 10.0 ** np.ceil(high))
        ax.yaxis.set_minor_formatter(plt.NullFormatter())
    axes[-1, 0].set_xlabel("hidden state after layer")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    return style.with_legend(fig, axes[0, 0].get_legend_handles_labels()[0], 3, "upper right", fontsize=9.5)
