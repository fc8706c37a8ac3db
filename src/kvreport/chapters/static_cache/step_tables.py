"""Tables of a single step: where its time goes, and how it grows with batch and context."""

import numpy as np
import pandas as pd

from kvreport.chapters.static_cache import step_budget
from kvreport.chapters.static_cache.tables import Limit, median

# The parts of a step, in the order of the page.
READING, REST_OF_KERNELS, CALLS, AROUND, PROFILED, STEP = (
    "reading weights and cache, at the memory limit", "the rest of the kernels", "calls of compiled graphs",
    "Python and small operations", "a step, profiled", "a step, not profiled",
)  # fmt: skip


def budget(rows: pd.DataFrame, bound: Limit) -> pd.DataFrame:
    """Take a step's milliseconds apart, by pages of memory, from rows of ``step_budget`` and `limit`: medians over repeats."""
    table = {}
    for pages, some in rows.groupby("pages", sort=False):
        ms = 1e3 * some.pivot_table(index="repeat", columns="part", values="seconds")
        kernels = ms[step_budget.LAYERS] + ms[step_budget.HEAD]
        reading = 1e3 / bound.tokens_per_second
        parts = {
            READING: kernels * 0 + reading, REST_OF_KERNELS: kernels - reading, CALLS: ms[step_budget.CALLS],
            AROUND: ms[step_budget.PROFILED] - kernels - ms[step_budget.CALLS], PROFILED: ms[step_budget.PROFILED],
            STEP: ms[step_budget.STEP],
        }  # fmt: skip
        table[pages] = {part: median(values) for part, values in parts.items()}
    return pd.DataFrame(table).rename_axis("part").reset_index()


def budget_table(found: pd.DataFrame) -> pd.DataFrame:
    """Write `budget` for a page."""
    written = {"part": found["part"]}
    for pages in found.columns[1:]:
        written[f"{pages} pages, ms"] = [
            f"{one.value:.1f}" if one.low == one.high else one.text("{:.1f}") for one in found[pages]
        ]
    return pd.DataFrame(written)


def by_context(rows: pd.DataFrame) -> pd.DataFrame:
    """Give a step's median milliseconds by dtype, batch and context, and its bytes, from rows of ``weights_or_cache``."""
    found = rows.groupby(["dtype", "batch", "context"], sort=False, as_index=False).agg(
        seconds=("seconds", "median"), weights_bytes=("weights_bytes", "first"), kv_bytes=("kv_bytes", "first")
    )
    return found.assign(ms=1e3 * found.pop("seconds"))


def doubled_at(found: pd.DataFrame, dtype: str, batch: int) -> float:
    """Give the context at which a step takes twice as long as at the shortest, on straight lines; infinite where it never does."""
    some = found[(found["dtype"] == dtype) & (found["batch"] == batch)].sort_values("context")
    ms, contexts = some["ms"].to_numpy(), some["context"].to_numpy()
    beyond = np.flatnonzero(ms >= 2 * ms[0])
    if not len(beyond):
        return np.inf
    after = beyond[0]
    return float(np.interp(2 * ms[0], ms[after - 1 : after + 1], contexts[after - 1 : after + 1]))


def as_many_bytes_at(found: pd.DataFrame, dtype: str, batch: int) -> float:
    """Give the context at which the caches of a batch hold as many bytes as the weights."""
    row = found[(found["dtype"] == dtype) & (found["batch"] == batch)].iloc[0]
    return float(row["context"] * row["weights_bytes"] / row["kv_bytes"])
