"""The figure of the page on the models: how the stand-ins learned.

Colour and line style together are the family; SmolLM2, which is of Llama's classes, has Llama's colour.  A masked
language model's loss is another quantity, so its line is thin.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression

from kvreport.chapters.models.rows import BASELINES
from kvreport.publishing import style

LINES = {
    "gpt2": (style.BLUE, "-"), "llama": (style.VERMILION, "-"), "qwen2": (style.BLACK, "--"),
    "smollm2": (style.VERMILION, ":"), "mpt": (style.GREEN, "-"), "falcon": (style.PURPLE, "--"),
    "roberta": (style.GREY, "-."),
}


def spread(places: np.ndarray, gap: float) -> np.ndarray:
    """Move labels apart, as little as it takes, so that no two are nearer than `gap`."""
    order, gaps = np.argsort(places), gap * np.arange(len(places))
    moved = np.empty(len(places))
    # Less the gaps between them, places must not fall.
    moved[order] = isotonic_regression(np.asarray(places, float)[order] - gaps).x + gaps
    return moved


def figure_curves(curves: pd.DataFrame, scores: pd.DataFrame) -> plt.Figure:
    """Draw every family's training loss against the tokens seen, its held-out score at the end, and the baselines."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.2))
    first, last, top = curves["tokens"].min(), curves["tokens"].max(), (0.9, 4.6)
    ax.set(xscale="log", yscale="log", xlabel="tokens seen in training", ylabel="bits per byte", ylim=top)
    for column, name in BASELINES.items():
        value = scores[column].median()
        ax.axhline(value, color=style.GREY, linewidth=1, linestyle=(0, (1, 2)))
        style.note(ax, name, (first, value), (2, 2), fontsize=8.5)
    scored = scores.set_index("family")["model"]
    families = list(curves.groupby(["name", "family"], sort=False))
    # Apart by a line of text: log of the axis' height over the number of such lines in it.
    places = spread(np.log([scored[family] for (_, family), _ in families]), np.log(top[1] / top[0]) / 18)
    for ((name, family), rows), place in zip(families, places, strict=True):
        colour, line = LINES.get(name, (style.GREY, "-"))
        width = 1 if rows["masked"].iloc[0] else 1.5
        ax.plot(rows["tokens"], rows["bits_per_byte"], color=colour, linestyle=line, linewidth=width)
        ax.plot([last * 1.25], [scored[family]], marker="o", markersize=4, color=colour, clip_on=False)
        # The leader is drawn as the family's curve is, so that it is the curve's key too.
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 1.2, "linestyle": line}
        ax.annotate(
            family, (last * 1.25, scored[family]), xytext=(last * 2.3, np.exp(place)), textcoords="data",
            color=colour, fontsize=9.5, va="center", annotation_clip=False,
            arrowprops=leader | {"relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 4},
        )
    ax.set_yticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
    ax.set_yticks([], minor=True)
    # The labels stand at its right.
    ax.set_xlim(first, last * 1.3)
    return fig
