"""Figures of the chapter on trainer and rollout."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from kvreport.publishing import style


def figure_mismatch(table: pd.DataFrame) -> Figure:
    """Draw how far trainer and rollout are apart, a row a comparison."""
    fig, ax = plt.subplots(figsize=(style.WIDTH, 0.9 + 0.32 * len(table)))
    for place, row in enumerate(table.itertuples()):
        style.plot_estimate(ax, row.mean_abs, place, marker="o", color=style.BLUE)
    ax.set(xscale="log", xlabel="mean |Δ log p| (nats)")
    ax.set_yticks(range(len(table)), table["compared"])
    ax.invert_yaxis()
    return fig
