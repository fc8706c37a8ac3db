"""The figure of the page on the models: how the stand-ins learned.

Colour and line style together are the family; SmolLM2, which is of Llama's classes, has Llama's colour.  A masked
language model's loss is another quantity, so its line is thin.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvreport.publishing import style

LINES = {
    "gpt2": (style.BLUE, "-"),
    "llama": (style.VERMILION, "-"),
    "qwen2": (style.BLACK, "--"),
    "smollm2": (style.VERMILION, ":"),
    "mpt": (style.GREEN, "-"),
    "falcon": (style.PURPLE, "--"),
    "roberta": (style.GREY, "-."),
}
BASELINES = {"unigram": "unigram", "bigram_backoff": "bigram, backoff", "xz_9": "xz -9"}


def spread(places: np.ndarray, gap: float) -> np.ndarray:
    """Move labels apart, as little as it takes, so that no two are nearer than `gap`."""
    order = np.argsort(places)
    moved = np.asarray(places, dtype=float)[order]
    # Touching labels move as one block, whose middle stays where its members' middle was.
    blocks = [[value, 1] for value in moved]
    merged: list[list[float]] = []
    for block in blocks:
        merged.append(block)
        while len(merged) > 1:
            (low, n_low), (high, n_high) = merged[-2], merged[-1]
            if high - low >= gap * (n_low + n_high) / 2:
                break
            merged[-2:] = [[(low * n_low + high * n_high) / (n_low + n_high), n_low + n_high]]
    settled = np.concatenate([middle + gap * (np.arange(n) - (n - 1) / 2) for middle, n in merged])
    result = np.empty_like(settled)
    result[order] = settled
    return result


def plot_curves(curves: pd.DataFrame, scores: pd.DataFrame, ax: Axes) -> Axes:
    """Draw every family's training loss against the tokens seen, its held-out score at the end, and the baselines."""
    ax.set(
        xscale="log", yscale="log", xlabel="tokens seen in training", ylabel="bits per byte", ylim=(0.9, 4.6),
    )
    last = curves["tokens"].max()
    for column, name in BASELINES.items():
        value = scores[column].median()
        ax.axhline(value, color=style.GREY, linewidth=1, linestyle=(0, (1, 2)))
        ax.annotate(
            name, (curves["tokens"].min(), value), xytext=(2, 2), textcoords="offset points", fontsize=8.5,
            color=style.GREY,
        )
    ends = []
    for name, rows in curves.groupby("name", sort=False):
        colour, line = LINES.get(name, (style.GREY, "-"))
        masked = bool(rows["masked"].iloc[0])
        ax.plot(
            rows["tokens"], rows["bits_per_byte"], color=colour, linestyle=line, linewidth=1 if masked else 1.5
        )
        family = rows["family"].iloc[0]
        score = scores.loc[scores["family"] == family, "model"].iloc[0]
        ax.plot([last * 1.25], [score], marker="o", markersize=4, color=colour, clip_on=False)
        ends.append((score, family, colour, line))
    # Apart by a line of text: log of the axis' height over the number of such lines in it.
    low, high = ax.get_ylim()
    places = spread(np.log([score for score, *_ in ends]), np.log(high / low) / 18)
    for (score, label, colour, line), place in zip(ends, places, strict=True):
        # The leader is drawn as the family's curve is, so that it is the curve's key too.
        ax.annotate(
            label, (last * 1.25, score), xytext=(last * 2.3, np.exp(place)), textcoords="data", color=colour,
            fontsize=9.5, va="center", annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": colour, "linewidth": 1.2, "linestyle": line, "relpos": (0, 0.5),
                "shrinkA": 2, "shrinkB": 4,
            },
        )
    ax.set_yticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
    ax.set_yticks([], minor=True)
    return ax


def figure_curves(curves: pd.DataFrame, scores: pd.DataFrame) -> Figure:
    """Draw `plot_curves` on a figure of its own, with room for the labels at its right."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.2))
    plot_curves(curves, scores, ax)
    ax.set_xlim(curves["tokens"].min(), curves["tokens"].max() * 1.3)
    return fig
