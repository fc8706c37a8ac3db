"""Tables of the chapter on issue 25420, as its page shows them."""

import pandas as pd

from kvreport.chapters.layer_drift import measures, rows
from kvreport.publishing.found import Found
from kvreport.publishing.measures import joined
from kvreport.publishing.wording import DTYPES

GROWTH, RATIO = "growth per layer", "ratio of drift / that of unit roundoffs"


def drawn(found: Found) -> pd.DataFrame:
    """Put our means and the issue's in one table, as they are drawn, told apart by a column ``published``."""
    ours, theirs = found["means"], found["published"]
    return pd.concat([ours.assign(published=False), theirs.assign(published=True)], ignore_index=True)


def laws(found: Found) -> pd.DataFrame:
    """Bring growth and ratios together, the issue's and ours."""
    table = []
    for quantity, measure, published in (
        (GROWTH, measures.THEIR_GROWTH, True), (GROWTH, measures.GROWTH, False),
        (RATIO, measures.THEIR_RATIO_OVER_ROUNDOFFS, True), (RATIO, measures.RATIO_OVER_ROUNDOFFS, False),
    ):
        for model, dtype, estimate in measure.table(found).itertuples(index=False, name=None):
            fine = measures._finer(dtype, list(found[measure.rows]["dtype"].unique()))
            dtypes = DTYPES[dtype] if quantity == GROWTH else f"{DTYPES[dtype]} / {DTYPES[fine]}"
            label = f"{model.split('/')[-1]}, {dtypes}{', the issue' if published else ''}"
            table.append((quantity, label, estimate, published))
    return pd.DataFrame(table, columns=["quantity", "label", "estimate", "published"])


def by_length(found: Found) -> pd.DataFrame:
    """Count, at the issue's length and at drawn ones, the texts whose logits are bitwise identical."""
    logits = found["logits at all lengths"]
    logits = logits[logits["model"] == logits["model"].iloc[0]]
    shares = measures.IDENTICAL_AT_ALL_LENGTHS.table(found).set_index(["tokens", "dtype"])["estimate"]
    return pd.DataFrame([
        {
            "tokens": tokens, "dtype": DTYPES[dtype],
            "bitwise identical": f"{of['identical'].sum()} of {of['sample'].nunique()}",
            "share": shares[tokens, dtype].text(), "mean relative drift": f"{of['relative_rms'].mean():.2g}",
        }
        for (tokens, dtype), of in logits.groupby(["tokens", "dtype"], sort=False)
    ])


def divergence_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Lay divergences out for reading: a row a method, a column a model and dtype."""
    table = table.assign(column=table["model"] + ", " + table["dtype"].map(DTYPES))
    kept = table.groupby(["method", "column"], sort=False)["equal"].agg(lambda of: f"{of.sum()} of {len(of)} equal")
    grid = kept.unstack().loc[list(rows.METHODS[1:]), list(dict.fromkeys(table["column"]))]
    # Of the first prompt; another one begins with another number of tokens.
    first = table[table["prompt"] == table["prompt"].iloc[0]]
    lengths = first.groupby("method")["final_cache_length"].agg(lambda held: ", ".join(map(str, sorted(set(held)))))
    grid.insert(0, "cache length", lengths)
    return grid.rename_axis(index="method", columns=None).reset_index()


def effects(found: Found) -> pd.DataFrame:
    """Take every mitigation against stock: drift by the ratio of means, times by the median of paired ratios."""
    columns = {
        "equal_share": measures.UPCAST_IDENTICAL, "drift_ratio": measures.UPCAST, "decode_ratio": measures.STEP,
        "full_ratio": measures.PASS,
    }
    return joined(columns, found)
