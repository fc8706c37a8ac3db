"""Tables behind the chapter on exact caches."""

import pandas as pd

from kvbook.measuring import estimates
from kvreport.chapters.exact_caches import ladder, paths
from kvreport.publishing.wording import DTYPES

# What the book sets itself: times of the switch over stock's, at most.
MOST_DECODE, MOST_PREFILL = 1.10, 1.50
# Errors against double precision, by the column that holds them, and of which pass they are.
ERRORS = {"error_rms": "the full pass", "step_error_rms": "token by token on a cache"}


def shares(ways: pd.DataFrame) -> pd.DataFrame:
    """Add up rows over samples."""
    keys = ["model", "dtype", "arithmetic", "way"]
    table = ways.groupby(keys, sort=False).agg(
        rows=("rows", "sum"), equal_rows=("equal_rows", "sum"), max_abs=("max_abs", "max"), flips=("flips", "sum")
    )
    table["share"] = table["equal_rows"] / table["rows"]
    return table.reset_index()


def ways_table(shares: pd.DataFrame) -> pd.DataFrame:
    """Lay equal rows out: a row a way and arithmetic, a column a dtype, over all models."""
    totals = shares.groupby(["way", "arithmetic", "dtype"], sort=False)[["equal_rows", "rows"]].sum()
    cells = totals["equal_rows"].map("{:,}".format) + " of " + totals["rows"].map("{:,}".format)
    grid = cells.unstack("dtype")[list(dict.fromkeys(shares["dtype"]))].rename(columns=DTYPES)
    order = [(way, a) for way in dict.fromkeys(shares["way"]) for a in paths.ARITHMETICS]
    grid["largest difference"] = shares.groupby(["way", "arithmetic"])["max_abs"].max()
    return grid.loc[order].rename_axis(columns=None).reset_index()


def ladder_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarise every rung."""
    both = rows[["error_rms", "step_error_rms"]].pow(2).mean(axis=1).pow(0.5)
    table = rows.assign(error=both / rows["reference_rms"]).groupby(["dtype", "rung"], sort=False).agg(
        rows=("rows", "sum"), equal_rows=("equal_rows", "sum"), max_abs=("max_abs", "max"), flips=("flips", "sum"),
        error=("error", "mean"),
    )  # fmt: skip
    table["share"] = table["equal_rows"] / table["rows"]
    order = [(dtype, rung) for dtype in dict.fromkeys(rows["dtype"]) for rung in ladder.RUNGS]
    return table.loc[order].reset_index()


def ladder_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Give what a reader wants of `ladder_table`, under a reader's names."""
    shown = table.assign(dtype=table["dtype"].map(DTYPES))
    shown["equal rows"] = shown["equal_rows"].map("{:,}".format) + " of " + shown["rows"].map("{:,}".format)
    shown = shown.rename(columns={"max_abs": "largest difference"})
    return shown[["dtype", "rung", "equal rows", "largest difference", "flips", "error"]]


def error_ratios(rows: pd.DataFrame, error: str) -> pd.DataFrame:
    """Take the error of the whole switch against double precision over stock's, by dtype."""
    table = [
        {"dtype": dtype, "ratio": estimates.paired_ratio(part.assign(variant=part["rung"]), error, "all", ladder.STOCK)}
        for dtype, part in rows.groupby("dtype", sort=False)
    ]
    return pd.DataFrame(table)


def costs(cost: pd.DataFrame) -> dict[str, estimates.Estimate]:
    """Take the switch's times over stock's: median over repeats of the ratio, with its interval."""
    rows = cost.assign(variant=cost["arithmetic"])
    return {
        name: estimates.paired_median_ratio(rows, f"{name}_s", paths.EXACT, paths.STOCK)
        for name in ("prefill", "decode")
    }


def promises(
    shares: pd.DataFrame, errors: dict[str, pd.DataFrame], times: dict[str, estimates.Estimate], cost_dtype: str
) -> pd.DataFrame:
    """Judge what the switch promises by this run's rows."""
    exact, stock = (shares[shares["arithmetic"] == name] for name in (paths.EXACT, paths.STOCK))
    fp32 = stock[(stock["dtype"] == "float32") & (stock["way"] == "token by token")]
    said = [
        (
            f"under the switch no bit of any row differs, in any of the {exact['way'].nunique()} ways to feed the tokens",
            f"{exact['equal_rows'].sum():,} of {exact['rows'].sum():,} rows equal",
            _word(bool((exact["equal_rows"] == exact["rows"]).all()), True),
        ),
        (
            "control: without it the same comparison fails in fp32",
            f"token by token, {fp32['equal_rows'].sum():,} of {fp32['rows'].sum():,} rows equal",
            _word(bool((fp32["equal_rows"] < fp32["rows"]).all()), len(fp32) > 0),
        ),
    ]
    for column, which in ERRORS.items():
        ratios = errors[column]
        said.append(
            (
                f"its error against double precision is no larger than stock's, within a tenth: {which}",
                "; ".join(f"{DTYPES[r.dtype]}: {r.ratio.text('{:.2f}')}" for r in ratios.itertuples()),
                _word(all(r.high <= 1.1 for r in ratios["ratio"]), any(r.low > 1.1 for r in ratios["ratio"]), True),
            )
        )
    for name, most in (("decode", MOST_DECODE), ("prefill", MOST_PREFILL)):
        time = times[name]
        said.append(
            (
                f"{name} in {DTYPES[cost_dtype]} takes at most {most:.2f} of stock's time",
                time.text("{:.2f}"),
                _word(time.high <= most, time.low > most, True),
            )
        )
    return pd.DataFrame(said, columns=["promise", "here", "verdict"])


def _word(kept: bool, decided: bool, needs_contradiction: bool = False) -> str:
    """Say kept, broken or undecided; with an interval, to break a promise takes evidence of its own."""
    if kept and (decided or needs_contradiction):
        return "kept"
    return "broken" if decided else "undecided"
