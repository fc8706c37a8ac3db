"""Which of the project's targets of speed the recorded benches meet, on each processor."""

import csv
import io
from typing import NamedTuple

import pandas as pd

from kvreport.running import bench_table as bench
from kvreport.site.context import Context
from kvreport.site.overlay import table_directive


class Target(NamedTuple):
    """What a bench's ratio should reach.

    Attributes
    ----------
    what : str
        A line of the bench.
    words : str
        The target as a reader says it.
    least : float
        The least ratio of the bench that meets it.
    inverse : bool
        Whether the words speak of the second's time over the first's, the bench's ratio turned over.
    """

    what: str
    words: str
    least: float
    inverse: bool = False


TARGETS = (
    Target(
        "static cache, one-row step on large pages, compiled, a token, bfloat16", "2.5 times `generate` or more", 2.5
    ),
    Target("row-invariant decode step, bfloat16", "1.10 of stock's time or less", 1 / 1.1, True),
    Target("row-invariant prefill of 512 tokens, bfloat16", "1.5 of stock's time or less", 1 / 1.5, True),
    Target("row-invariant decode step, float32", "1.15 of stock's time or less", 1 / 1.15, True),
    Target("row-invariant prefill of 512 tokens, float32", "1.25 of stock's time or less", 1 / 1.25, True),
    Target("row-invariant decode step, sliding window, bfloat16", "1.25 of stock's time or less", 1 / 1.25, True),
    Target("row-invariant decode step, mixture of experts, bfloat16", "1.25 of stock's time or less", 1 / 1.25, True),
)


def markdown(_context: Context) -> str:
    """Write the table of targets, a column for each processor; nothing where no bench was run."""
    runs = bench.latest()
    if not runs:
        return ""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["what", "target", *map(bench.heading, runs.values())])
    for target in TARGETS:
        writer.writerow([target.what, target.words, *(_met(target, run.rows) for run in runs.values())])
    caption = (
        "Targets of speed, and what the medians of the benches above say of them. Narrowly: the bracket holds the target. "
        "A cell is empty where that bench did not measure it. "
        "Held to: in matrix products oneDNN took no later instructions than those, by `ONEDNN_MAX_CPU_ISA`."
    )
    return table_directive({"caption": caption, "name": "tab-targets", "csv": lines.getvalue()})


def _met(target: Target, rows: pd.DataFrame) -> str:
    measured = rows.set_index("what")
    if target.what not in measured.index:
        return ""
    row = measured.loc[target.what]
    shown = 1 / row["ratio"] if target.inverse else row["ratio"]
    narrowly = ", narrowly" if row["lowest"] < target.least <= row["highest"] else ""
    return f"{shown:.2f}: {'met' if row['ratio'] >= target.least else 'not met'}{narrowly}"
