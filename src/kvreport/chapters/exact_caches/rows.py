"""The rows of the chapter on exact caches by name; to read them takes no torch."""

import pandas as pd

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"exact_ways": 1, "exact_ladder": 1, "exact_cost": 1, "exact_lengths": 1}

ARITHMETICS = STOCK, EXACT = ("stock", "row-invariant")
# One of the ways to feed a text.
SINGLE = "token by token"
# Which parts of the arithmetic are row-invariant, from none to all.
RUNGS = STOCK, EAGER, ATTENTION, PRODUCTS, BOTH, ALL = (
    "stock", "stock, eager", "attention", "products", "products + attention", "all",
)


def _compared(rows: pd.DataFrame) -> pd.DataFrame:
    differing = rows["rows"] - rows["equal_rows"]
    return rows.assign(differing=differing, identical=differing == 0)


def ways(exact_ways: pd.DataFrame) -> pd.DataFrame:
    """Tell the first model's rows from those of its company of other families."""
    return _compared(exact_ways).assign(own=exact_ways["model"] == exact_ways["model"].iloc[0])


def lengths(exact_lengths: pd.DataFrame) -> pd.DataFrame:
    """Count the rows that differ in texts of many lengths."""
    return _compared(exact_lengths)


def ladder(exact_ladder: pd.DataFrame) -> pd.DataFrame:
    """Count the rows that differ on every rung."""
    return _compared(exact_ladder)


def long_texts(lengths: pd.DataFrame) -> pd.DataFrame:
    """Add up over the ways to feed a text."""
    return lengths.groupby(["dtype", "arithmetic", "sample", "source"], sort=False)["differing"].sum().reset_index()


def _added(rows: pd.DataFrame, *keys: str, **more: tuple[str, str]) -> pd.DataFrame:
    """Add up rows over samples."""
    table = rows.groupby(list(keys), sort=False).agg(
        rows=("rows", "sum"), equal_rows=("equal_rows", "sum"), max_abs=("max_abs", "max"), flips=("flips", "sum"),
        **more,
    )
    return table.assign(share=table["equal_rows"] / table["rows"])


def shares(ways: pd.DataFrame) -> pd.DataFrame:
    """Share of rows that are bitwise identical, by model, dtype, arithmetic and way."""
    return _added(ways, "model", "dtype", "arithmetic", "way").reset_index()


def rungs(ladder: pd.DataFrame) -> pd.DataFrame:
    """Summarise every rung; its error is that of both passes."""
    both = ladder[["error_rms", "step_error_rms"]].pow(2).mean(axis=1).pow(0.5)
    table = _added(ladder.assign(error=both / ladder["reference_rms"]), "dtype", "rung", error=("error", "mean"))
    return table.loc[[(dtype, rung) for dtype in dict.fromkeys(ladder["dtype"]) for rung in RUNGS]].reset_index()


def times(exact_cost: pd.DataFrame) -> pd.DataFrame:
    """List the times of both phases, one under the other."""
    times = exact_cost.melt(["repeat", "source", "sample", "arithmetic"], ["prefill_s", "decode_s"], "phase", "seconds")
    return times.assign(phase=times["phase"].str.removesuffix("_s"))
