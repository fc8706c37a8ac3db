"""Tables of the chapter on exact caches, as its page shows them."""

import pandas as pd

from kvreport.chapters.exact_caches import measures
from kvreport.chapters.exact_caches.rows import ARITHMETICS, EXACT, STOCK
from kvreport.publishing.found import Found
from kvreport.publishing.wording import DTYPES


def _counted(table: pd.DataFrame) -> pd.Series:
    return table["equal_rows"].map("{:,}".format) + " of " + table["rows"].map("{:,}".format)


def ways(shares: pd.DataFrame) -> pd.DataFrame:
    """Lay the first model's rows out: a row for each way, columns for each dtype."""
    own = shares[shares["model"] == shares["model"].iloc[0]]
    own = own.assign(counted=_counted(own)).pivot(index="way", columns=["dtype", "arithmetic"])
    columns = {}
    for dtype in dict.fromkeys(shares["dtype"]):
        for arithmetic in ARITHMETICS:
            columns[f"{arithmetic}, {DTYPES[dtype]}"] = own["counted", dtype, arithmetic]
        columns[f"stock differs by, {DTYPES[dtype]}"] = own["max_abs", dtype, STOCK]
    return pd.DataFrame(columns).loc[list(dict.fromkeys(shares["way"]))].reset_index(names="fed")


def lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Count identical rows by length of the text: in row-invariant mode over all dtypes and ways, in stock by dtype."""
    table = rows.groupby("n_tokens").agg(texts=("sample", "nunique"))
    exact = rows["arithmetic"] == EXACT
    parts = {"row-invariant, all dtypes": rows[exact]}
    parts |= {f"stock, {DTYPES[dtype]}": part for dtype, part in rows[~exact].groupby("dtype", sort=False)}
    for name, part in parts.items():
        table[name] = _counted(part.groupby("n_tokens")[["equal_rows", "rows"]].sum())
    return table.reset_index(names="tokens")


def cost(found: Found) -> pd.DataFrame:
    """Lay times and their ratio out for a reader."""
    medians = 1e3 * found["times"].groupby(["phase", "arithmetic"])["seconds"].median().unstack()
    table = measures.PRICE.table(found, "ratio").set_index("phase")
    times = {f"{arithmetic} (ms)": medians[arithmetic].map("{:.0f}".format) for arithmetic in ARITHMETICS}
    return table[[]].assign(**times, ratio=table["ratio"].map(lambda ratio: ratio.text("{:.2f}"))).reset_index()
