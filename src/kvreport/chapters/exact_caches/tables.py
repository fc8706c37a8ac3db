"""Tables behind the chapter on exact caches."""

import pandas as pd

from kvbook.measuring import estimates
from kvreport.chapters.exact_caches import ladder, paths
from kvreport.publishing.wording import DTYPES

# Errors against double precision, by the column that holds them, and of which pass they are.
ERRORS = {"error_rms": "full pass", "step_error_rms": "token by token"}


def shares(ways: pd.DataFrame) -> pd.DataFrame:
    """Add up rows over samples."""
    keys = ["model", "dtype", "arithmetic", "way"]
    table = ways.groupby(keys, sort=False).agg(
        rows=("rows", "sum"), equal_rows=("equal_rows", "sum"), max_abs=("max_abs", "max"), flips=("flips", "sum")
    )
    table["share"] = table["equal_rows"] / table["rows"]
    return table.reset_index()


def ways_table(shares: pd.DataFrame) -> pd.DataFrame:
    """Lay the first model's rows out: a row for each way, columns for each dtype."""
    one = shares[shares["model"] == shares["model"].iloc[0]].set_index(["way", "arithmetic", "dtype"])
    table = pd.DataFrame({"fed": list(dict.fromkeys(shares["way"]))})
    for dtype in dict.fromkeys(shares["dtype"]):
        for arithmetic in paths.ARITHMETICS:
            rows = one.xs((arithmetic, dtype), level=("arithmetic", "dtype"))
            cells = rows["equal_rows"].map("{:,}".format) + " of " + rows["rows"].map("{:,}".format)
            table[f"{arithmetic}, {DTYPES[dtype]}"] = table["fed"].map(cells)
        stock = one.xs((paths.STOCK, dtype), level=("arithmetic", "dtype"))
        table[f"stock differs by, {DTYPES[dtype]}"] = table["fed"].map(stock["max_abs"])
    return table


def lengths_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Count identical rows by length of the text: in row-invariant mode over all dtypes and ways, in stock by dtype."""
    table = rows.groupby("n_tokens").agg(texts=("sample", "nunique"))
    exact = rows["arithmetic"] == paths.EXACT
    parts = {"row-invariant, all dtypes": rows[exact]}
    parts |= {f"stock, {DTYPES[dtype]}": part for dtype, part in rows[~exact].groupby("dtype", sort=False)}
    for name, part in parts.items():
        sums = part.groupby("n_tokens")[["equal_rows", "rows"]].sum()
        table[name] = sums["equal_rows"].map("{:,}".format) + " of " + sums["rows"].map("{:,}".format)
    return table.reset_index(names="tokens")


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
    shown["identical rows"] = shown["equal_rows"].map("{:,}".format) + " of " + shown["rows"].map("{:,}".format)
    shown = shown.rename(columns={"max_abs": "largest difference", "rung": "row-invariant", "flips": "top-1 flips"})
    return shown[["dtype", "row-invariant", "identical rows", "largest difference", "top-1 flips", "error"]]


def error_ratios(rows: pd.DataFrame, error: str) -> pd.DataFrame:
    """Take the error of the whole mode against double precision over stock's, by dtype."""
    table = [
        {"dtype": dtype, "ratio": estimates.paired_ratio(part.assign(variant=part["rung"]), error, "all", ladder.STOCK)}
        for dtype, part in rows.groupby("dtype", sort=False)
    ]
    return pd.DataFrame(table)


def costs(cost: pd.DataFrame) -> dict[str, estimates.Estimate]:
    """Take the mode's times over stock's: median over repeats of the ratio, with its interval."""
    rows = cost.assign(variant=cost["arithmetic"])
    return {
        name: estimates.paired_median_ratio(rows, f"{name}_s", paths.EXACT, paths.STOCK)
        for name in ("prefill", "decode")
    }


def cost_shown(cost: pd.DataFrame) -> pd.DataFrame:
    """Lay times and their ratio out for a reader."""
    seconds = cost.groupby("arithmetic")[["prefill_s", "decode_s"]].median()
    return pd.DataFrame(
        [
            {
                "phase": name,
                **{
                    f"{arithmetic} (ms)": f"{1e3 * seconds.loc[arithmetic, f'{name}_s']:.0f}"
                    for arithmetic in paths.ARITHMETICS
                },
                "ratio": ratio.text("{:.2f}"),
            }
            for name, ratio in costs(cost).items()
        ]
    )
