"""The rows of the chapter on exact caches by name; to read them takes no torch."""

import pandas as pd

from kvbook.runs.records import Run
from kvreport.publishing.found import Frame

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"exact_ways": 1, "exact_ladder": 1, "exact_cost": 1, "exact_lengths": 1}

ARITHMETICS = STOCK, EXACT = ("stock", "row-invariant")
# One of the ways to feed a text.
SINGLE = "token by token"
# Which parts of the arithmetic are row-invariant, from none to all.
RUNGS = STOCK, EAGER, ATTENTION, PRODUCTS, BOTH, ALL = (
    "stock", "stock, eager", "attention", "products", "products + attention", "all",
)


def _compared(run: Run) -> pd.DataFrame:
    differing = run.rows["rows"] - run.rows["equal_rows"]
    return run.rows.assign(differing=differing, identical=differing == 0)


def _ways(run: Run) -> pd.DataFrame:
    """Tell the first model's rows from those of its company of other families."""
    return _compared(run).assign(own=run.rows["model"] == run.rows["model"].iloc[0])


def _by_text(lengths: pd.DataFrame) -> pd.DataFrame:
    """Add up over the ways to feed a text."""
    return lengths.groupby(["dtype", "arithmetic", "sample", "source"], sort=False)["differing"].sum().reset_index()


def _added(rows: pd.DataFrame, *keys: str, **more: tuple[str, str]) -> pd.DataFrame:
    """Add up rows over samples."""
    table = rows.groupby(list(keys), sort=False).agg(
        rows=("rows", "sum"), equal_rows=("equal_rows", "sum"), max_abs=("max_abs", "max"), flips=("flips", "sum"),
        **more,
    )
    return table.assign(share=table["equal_rows"] / table["rows"])


def _rungs(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarise every rung; its error is that of both passes."""
    both = rows[["error_rms", "step_error_rms"]].pow(2).mean(axis=1).pow(0.5)
    table = _added(rows.assign(error=both / rows["reference_rms"]), "dtype", "rung", error=("error", "mean"))
    return table.loc[[(dtype, rung) for dtype in dict.fromkeys(rows["dtype"]) for rung in RUNGS]].reset_index()


def _times(run: Run) -> pd.DataFrame:
    times = run.rows.melt(["repeat", "source", "sample", "arithmetic"], ["prefill_s", "decode_s"], "phase", "seconds")
    return times.assign(phase=times["phase"].str.removesuffix("_s"))


ROWS = {
    "ways": Frame(_ways, ("exact_ways",)),
    "shares": Frame(lambda ways: _added(ways, "model", "dtype", "arithmetic", "way").reset_index(), ("ways",)),
    "lengths": Frame(_compared, ("exact_lengths",)),
    "long texts": Frame(_by_text, ("lengths",)),
    "ladder": Frame(_compared, ("exact_ladder",)),
    "rungs": Frame(_rungs, ("ladder",)),
    "times": Frame(_times, ("exact_cost",)),
}
