"""Figures of the chapter on bug or rounding."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from kvbook.diagnosis import verdict
from kvbook.measuring.agreement import UNIT_ROUNDOFF
from kvreport.chapters.bug_or_rounding import first_bad_layer, symptoms
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

# Colour, marker and line say the verdict thrice.
KINDS = {
    "rounding": (style.BLUE, "o", "-"),
    "exact": (style.GREEN, "D", "-"),
    "bug": (style.VERMILION, "s", "--"),
    "undecided": (style.PURPLE, "^", ":"),
}


def _frame(ax: Axes, dtypes: list[str]) -> None:
    """Prepare log-log axes: a tick a dtype, the line of one roundoff, and the edge of what rounding can be."""
    roundoffs = np.array([UNIT_ROUNDOFF[dtype] for dtype in dtypes])
    ends = np.array([roundoffs.min(), roundoffs.max()])
    ax.set(xscale="log", yscale="log", xlabel="unit roundoff", ylabel="drift / spread of the logits")
    ax.plot(ends, ends, color=style.GREY, linestyle=":", linewidth=1)
    ax.annotate("one roundoff", (ends[0], ends[0]), (24, -2), textcoords="offset points", color=style.GREY, fontsize=9)
    fine = roundoffs[roundoffs * verdict.LIMIT < 1]
    if len(fine):
        ax.plot(fine, fine * verdict.LIMIT, color=style.GREY, linestyle="-.", linewidth=1)
        middle = np.sqrt(fine.min() * fine.max())
        ax.annotate(
            "a bug above", (middle, middle * verdict.LIMIT), (-4, 2), textcoords="offset points", ha="right",
            color=style.GREY, fontsize=9,
        )  # fmt: skip
    # fp16 and bf16 lie too close for two labels on one line.
    names = [("\n" if dtype == "bfloat16" else "") + DTYPES[dtype] for dtype in dtypes]
    ax.set_xticks(roundoffs, names)
    ax.minorticks_off()


def _draw(ax: Axes, line: pd.DataFrame, kind: str, alpha: float = 1.0) -> None:
    colour, marker, dash = KINDS[kind]
    # A logarithmic axis has no place for a drift of zero, nor for an overflow.
    shown = line[(line["drift"] > 0) & np.isfinite(line["drift"])]
    ax.plot(shown["roundoff"], shown["drift"], color=colour, marker=marker, linestyle=dash, alpha=alpha, linewidth=1.2)


def _dtypes(lines: pd.DataFrame) -> list[str]:
    return [dtype for dtype in UNIT_ROUNDOFF if dtype in set(lines["dtype"])]


def _say(ax: Axes, text: str, kind: str, at: tuple[float, float]) -> None:
    ax.text(*at, text, transform=ax.transAxes, color=KINDS[kind][0], fontsize=9, va="top")


def figure_planted(lines: pd.DataFrame, table: pd.DataFrame, said: dict[str, str]) -> Figure:
    """Draw drift against unit roundoff, of clean families and of planted bugs."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.4))
    _frame(ax, _dtypes(lines))
    kinds = table.set_index(["symptom", "model"])["kind"]
    for (symptom, model), line in lines.groupby(["symptom", "model"], sort=False):
        _draw(ax, line, kinds[(symptom, model)], 0.9 if symptom in (symptoms.CLEAN, first_bad_layer.NARROW) else 0.45)
    _say(ax, said["bugs"], "bug", (0.02, 0.985))
    if said.get("hidden"):
        _say(ax, said["hidden"], "bug", (0.02, 0.6))
    _say(ax, said["clean"], "rounding", (0.44, 0.3))
    ax.set_ylim(top=1e3)
    return fig


def figure_symptoms(lines: pd.DataFrame, table: pd.DataFrame) -> Figure:
    """Draw every symptom of the documents: drift against unit roundoff, and the slopes with their intervals."""
    rows = _with_headings(table)
    fig, (ax, forest) = plt.subplots(
        2, 1, figsize=(style.WIDTH, 3.6 + 0.24 * len(rows)), height_ratios=(3.2, 0.24 * len(rows))
    )
    _frame(ax, _dtypes(lines))
    kinds = table.set_index(["symptom", "model"])["kind"]
    for key, line in lines.groupby(["symptom", "model"], sort=False):
        _draw(ax, line, kinds[key])
    ax.set_ylim(top=30)
    for place, row in enumerate(rows):
        if row is None or isinstance(row, str):
            continue
        colour, marker, _ = KINDS[row["kind"]]
        if row["slope"] is None:
            forest.annotate(
                f"{row['kind']}, no slope", (0.5, place), color=colour, fontsize=9, va="center", ha="center"
            )
            continue
        slope = row["slope"]
        forest.errorbar(
            slope.value, place, xerr=[[slope.value - slope.low], [slope.high - slope.value]], fmt=marker, color=colour
        )
    forest.set_yticks(range(len(rows)), [row if isinstance(row, str) else row["symptom"] for row in rows], fontsize=9)
    for label, row in zip(forest.get_yticklabels(), rows, strict=True):
        if isinstance(row, str):
            label.set_fontweight("bold")
    forest.tick_params(axis="y", length=0)
    forest.set_ylim(len(rows) - 0.4, -0.6)
    forest.set_xlim(-0.35, 1.35)
    forest.axvline(verdict.BOUNDARY, color=style.GREY, linestyle="-.", linewidth=1)
    forest.set_xticks([0, 0.5, 1], ["0\na bug", "½", "1\nrounding"])
    forest.set_xlabel("slope of log drift on log roundoff")
    forest.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle=dash, label=kind)
        for kind, (colour, marker, dash) in KINDS.items()
        if kind in set(table["kind"])
    ]
    fig.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9)
    return fig


def _with_headings(table: pd.DataFrame) -> list:
    rows: list = []
    for document, part in table.groupby("document", sort=False):
        rows += [str(document), *part.to_dict("records")]
    return rows


def figure_layers(table: pd.DataFrame) -> Figure:
    """Draw the drift behind every layer, in the finest and in the coarsest dtype, of a clean model and of planted ones."""
    dtypes = _dtypes(table)
    shown = list(dict.fromkeys((dtypes[0], dtypes[-1])))
    fig, axes = plt.subplots(len(shown), 1, sharex=True, squeeze=False, figsize=(style.WIDTH, 0.8 + 2.2 * len(shown)))
    looks = {
        first_bad_layer.CLEAN: (style.BLUE, "o", "-"),
        first_bad_layer.LATE: (style.VERMILION, "s", "--"),
        first_bad_layer.NARROW: (style.PURPLE, "^", ":"),
    }
    for ax, dtype in zip(axes[:, 0], shown, strict=True):
        part = table[(table["dtype"] == dtype) & (table["drift"] > 0)]
        for bug, (colour, marker, dash) in looks.items():
            line = part[part["bug"] == bug]
            # Hollow and of growing size, so that lines which coincide can all be seen.
            ax.plot(
                line["layer"], line["drift"], color=colour, marker=marker, linestyle=dash, label=bug,
                markerfacecolor="none", markersize=4 + 2.5 * list(looks).index(bug),
            )  # fmt: skip
        if UNIT_ROUNDOFF[dtype] * verdict.LIMIT < 1:
            ax.axhline(UNIT_ROUNDOFF[dtype] * verdict.LIMIT, color=style.GREY, linestyle="-.", linewidth=1)
            ax.annotate(
                "a bug above", (0.01, UNIT_ROUNDOFF[dtype] * verdict.LIMIT), (0, 4),
                xycoords=ax.get_yaxis_transform(), textcoords="offset points", color=style.GREY, fontsize=9,
            )  # fmt: skip
        ax.set(yscale="log", ylabel=f"relative drift, {DTYPES[dtype]}")
        # Whole decades, so that both ends have a label.
        low, high = np.log10(ax.get_ylim())
        ax.set_ylim(10.0 ** np.floor(low), 10.0 ** np.ceil(high))
        ax.yaxis.set_minor_formatter(NullFormatter())
    axes[-1, 0].set_xlabel("layer")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=9)
    return fig
