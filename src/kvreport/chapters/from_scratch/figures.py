"""Figures of the chapter on the thread about a model from scratch.

A way keeps its colour and its marker through all figures.
"""

import matplotlib.pyplot as plt
import pandas as pd

from kvreport.chapters.from_scratch import rows as names
from kvreport.publishing import style
from kvreport.publishing.wording import DTYPES

# The figure of costs is linear up to here on either side of 0.
LINEAR_NATS = 0.02
REFILL = "refill"
LOOKS = {
    names.WINDOW: (style.BLACK, "o"), names.ABSOLUTE: (style.GREEN, "^"), names.POSTED: (style.VERMILION, "s"),
    names.REPLY: (style.PURPLE, "v"), names.FORGOTTEN: (style.GREY, "D"), REFILL: (style.BLUE, "D"),
}


def _look(way: str) -> dict[str, str]:
    colour, marker = LOOKS[REFILL if way.startswith(REFILL) else way]
    return {"color": colour, "marker": marker}


def _plot_line(ax: plt.Axes, places: pd.Series, estimates: pd.Series, **look) -> None:
    """Draw estimates with their intervals, joined by a line."""
    ax.errorbar(places, [one.value for one in estimates], yerr=style.ends(estimates), **{"linestyle": "-"} | look)


def figure_steps(logits: pd.DataFrame) -> plt.Figure:
    """Draw how far each way that ought to agree with its reference is from it at each step, a panel for each dtype."""
    block, groups = int(logits["block"].iloc[0]), list(logits.groupby("dtype", sort=False))
    fig, axes = style.panels(1, len(groups), 3.8, sharey=True)
    # Where lines lie on one another, the lower ones are wider.
    widths = {names.FORGOTTEN: 1.0, names.POSTED: 4.0, names.REPLY: 2.5, names.half_refill(block): 1.0}
    for ax, (dtype, of_dtype) in zip(axes[0], groups, strict=True):
        for way, width in widths.items():
            rows = of_dtype[(of_dtype["comparison"] == way) & (of_dtype["max_abs"] > 0)]
            ax.plot(
                rows["length"], rows["max_abs"], markersize=3 + width / 2, linestyle="-", linewidth=width,
                markevery=max(1, block // 4), label=way, **_look(way),
            )
        ax.axvline(block, **style.REFERENCE)
        ax.set(yscale="log", xlabel="characters read", ylabel="largest difference of the logits")
        ax.set_title(DTYPES[dtype], loc="left", fontsize=10)
        ax.label_outer()
    return style.with_legend(fig, axes[0][0].get_legend_handles_labels()[0], 2)


def plot_buckets(buckets: pd.DataFrame, value: str, ways: tuple[str, ...], ax: plt.Axes) -> None:
    """Draw the loss of ways, or their gap to the window, by how much was read."""
    bounds = buckets[["read_from", "read_to"]].drop_duplicates().reset_index(drop=True)
    place = {end: at for at, end in enumerate(bounds["read_to"])}
    for number, way in enumerate(ways):
        rows = buckets[buckets["way"] == way]
        places = rows["read_to"].map(place) + 0.12 * (number - (len(ways) - 1) / 2)
        _plot_line(ax, places, rows[value], markersize=4, linewidth=1, label=way, **_look(way))
    labels = [f"{begin + 1}–{end}" for begin, end in bounds.to_numpy()]
    ax.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=9)
    past = buckets.loc[buckets["read_from"] >= buckets["block"], "read_to"]
    if len(past):
        ax.axvline(place[past.min()] - 0.5, **style.REFERENCE)
    ax.set_xlabel("characters read")


def figure_loss(buckets: pd.DataFrame) -> plt.Figure:
    """Draw every way's loss on the left, and on the right the gap to the window of those that lie close."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(style.WIDTH, 4.1))
    half = names.half_refill(int(buckets["block"].iloc[0]))
    plot_buckets(buckets, "nats", (names.WINDOW, names.POSTED, names.REPLY, names.FORGOTTEN), left)
    left.set_ylabel("loss (nats a character)")
    plot_buckets(buckets, "gap", (names.ABSOLUTE, names.POSTED, half), right)
    right.axhline(0, color=style.BLACK, linewidth=1)
    right.set_ylabel("loss minus the window's")
    keys = {label: key for ax in (left, right) for key, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    return style.with_legend(fig, list(keys.values()), 2)


def figure_causes(causes: pd.DataFrame) -> plt.Figure:
    """Draw the gap past the block under each change of the posted cache."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 0.9 + 0.38 * len(causes)))
    style.plot_estimates(causes, ax, reference=0.0, form="{:+.3f}")
    ax.margins(x=0.09)
    ax.set_xlabel("loss minus the window's (nats)")
    return fig


def figure_sizes(sizes: pd.DataFrame) -> plt.Figure:
    """Draw the gap past the block under each change, a marker for each of two sizes of model."""
    labels, models = list(dict.fromkeys(sizes["label"])), list(dict.fromkeys(sizes["size"]))
    fig, ax = style.rows(labels, 1.3, 0.42, above=0.6)
    looks = ((style.GREY, "o", "white"), (style.VERMILION, "s", style.VERMILION))
    for shift, name, (colour, marker, face) in zip((-0.22, 0.22), models, looks, strict=True):
        rows = sizes[sizes["size"] == name]
        places = [labels.index(label) + shift for label in rows["label"]]
        ax.errorbar(
            [one.value for one in rows["estimate"]], places, xerr=style.ends(rows["estimate"]), color=colour,
            marker=marker, markerfacecolor=face, markersize=5, linestyle="", label=name,
        )
    ax.axvline(0, **style.REFERENCE)
    ax.set_xlabel("loss minus the window's (nats)")
    return style.with_legend(fig, ax.get_legend_handles_labels()[0], 2)


def figure_speed(speeds: pd.DataFrame) -> plt.Figure:
    """Draw how many times as long a step takes without a cache, by length, with the reply's factor marked."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 3.6))
    models = {names.TRAINED: ("trained model", style.BLUE), names.REPLYS_MODEL: ("reply's size", style.VERMILION)}
    dashed = {"linestyle": "--", "marker": "o", "markerfacecolor": "white"}
    solid = {"linestyle": "-", "marker": "s"}
    ways = {names.ALL_ROWS: ("all rows of logits", solid), names.WINDOW: ("one row of logits", dashed)}
    for model, (_, colour) in models.items():
        for way, (_, look) in ways.items():
            rows = speeds[(speeds["model"] == model) & (speeds["way"] == way)]
            _plot_line(ax, rows["length"], rows["ratio"], color=colour, linewidth=1.2, **look)
    ax.axhline(3, **style.REFERENCE)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    style.plain_logarithm(ax.yaxis)
    style.note(ax, "3, as published", (0, 3), (2, 3), xycoords=("axes fraction", "data"))
    ax.set(xlabel="length of the text at the step", ylabel="time without cache / with")
    keys = [style.key(label, colour, linewidth=3) for label, colour in models.values()]
    return style.with_legend(fig, [*keys, *(style.key(label, **look) for label, look in ways.values())], 2)


def figure_cost(costs: pd.DataFrame) -> plt.Figure:
    """Draw what each way loses past the block against what it costs there."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 4.0))
    refills = costs[costs["way"].str.startswith(REFILL)]
    line = ([one.value for one in refills[column]] for column in ("time_ratio", "gap"))
    ax.plot(*line, color=_look(REFILL)["color"], linewidth=1, linestyle="-")
    hops = iter(("o", "s", "^", "D"))
    for row in costs.itertuples():
        time, gap = row.time_ratio, row.gap
        look = _look(row.way) | ({"marker": next(hops)} if row.way.startswith(REFILL) else {})
        ax.errorbar(
            time.value, gap.value, xerr=style.ends([time]), yerr=style.ends([gap]), linewidth=1, markersize=6,
            label=f"{row.way} ({gap.value:+.3f})", linestyle="", **look,
        )
    ax.axhline(0, color=style.BLACK, linewidth=1)
    # What is lost spans two orders, and zero is the place to be.
    ax.set_yscale("symlog", linthresh=LINEAR_NATS)
    ax.set_yticks([sign * tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) for sign in (-1, 1)] + [0])
    ax.set_ylim(min(-0.02, 1.4 * min(e.low for e in costs["gap"])), max(e.high for e in costs["gap"]) * 1.3)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    ax.set_xscale("log")
    style.plain_logarithm(ax.xaxis, (0.8, 1, 1.5, 2, 3, 4, 5, 6))
    ax.set(
        xlabel="time past the block / the posted cache's",
        ylabel=f"loss minus the window's (nats)\nlinear within ±{LINEAR_NATS}",
    )
    return style.with_legend(fig, ax.get_legend_handles_labels()[0], 2)
