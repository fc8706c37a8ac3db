"""Tables of the chapter on trainer and rollout."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kvbook.models.corpus import POPULATIONS
from kvbook.scores import measures as scores
from kvreport.chapters.trainer_and_rollout import measures
from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.publishing.found import Found
from kvreport.publishing.measures import joined

# How a reader's columns call the measures.
_COLUMNS = {
    measures.MEAN_ABS: "mean |Δ log p|", measures.EXP_ABS: "mean exp|Δ log p|", measures.K1: "k1", measures.K2: "k2",
    measures.K3: "k3", measures.CHI_SQUARED: "χ²", measures.OUTSIDE: "outside [0.9, 1.1]",
    measures.CLIPPED: "outside [0.8, 1.2]",
}


def by_way(found: Found) -> pd.DataFrame:
    """Work out both measures of every way that is drawn, in the order of the figure."""
    table = joined({"mean_abs": measures.WAY_ABS, "outside": measures.WAY_OUTSIDE}, found)
    return table[~table["compared"].isin((named.ROLLOUT_ERROR, named.TRAINER_ERROR))].reset_index(drop=True)


def mismatch(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """Work out both measures of every comparison on each population of texts."""
    measured = {"mean_abs": measures.MEAN_ABS, "outside": measures.OUTSIDE}
    tables = {_texts(found): joined(measured, found) for found in everywhere.values() if found["pairs"] is not None}
    return pd.concat(tables, names=["texts"]).reset_index("texts").reset_index(drop=True)


def _texts(found: Found) -> str:
    return POPULATIONS.get(found.noted("rollout", "settings", "corpus"), "another corpus")


def vocabulary(found: Found) -> pd.DataFrame:
    """Lay the measures of every comparison out for a reader; all cells text."""
    table = joined({name: measure for measure, name in _COLUMNS.items()}, found)
    shown = {name: [measure.form.format(one.value) for one in table[name]] for measure, name in _COLUMNS.items()}
    return pd.DataFrame({"compared": table["compared"]} | shown)


def by_texts(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """Lay out what the first comparison gives on each population of texts."""
    shown = {
        f"{_COLUMNS[measure]}, {compared}": measure.where(compared=compared)
        for measure in (measures.MEAN_ABS, measures.OUTSIDE, measures.CLIPPED)
        for compared in (named.BF16, named.FP16, named.FULL)
    }
    rows = []
    for found in everywhere.values():
        cells = {column: one.estimate.text(of.form) for column, of in shown.items() for one in of(found)}
        if cells:
            tokens = found["rollout"]
            about = {"texts": _texts(found), "prompts": tokens["sample"].nunique()}
            rows.append(about | {"tokens": f"{len(tokens):,}"} | cells)
    return pd.DataFrame(rows)


def _pooled(everywhere: Mapping[str, Found], frame: str) -> pd.DataFrame:
    return pd.concat([rows for one in everywhere.values() if (rows := one[frame]) is not None], ignore_index=True)


def sequences(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """Pool the sequences of all populations, and give effective sample sizes by length, seen and expected.

    If tokens' log-ratios were independent with one variance v, those of L tokens would be about normal with variance
    L v, and the effective sample size exp(-L v).
    """
    rows, pooled = [], _pooled(everywhere, "sequences")
    longest = pooled["size"].max()
    # Further on the same texts come again.
    pooled = pooled[pooled["length"] < 2 * longest]
    for (compared, length), part in pooled.groupby(["compared", "length"], sort=False):
        sums = part["sum"].to_numpy()
        rows.append({
            "compared": compared, "length": min(length, longest), "sequences": len(part),
            "mean_length": part["size"].mean(), "effective": scores.effective_share(sums),
            "truncated": scores.effective_share(np.minimum(sums, np.log(named.CAP))),
            "share_truncated": (sums > np.log(named.CAP)).mean(),
            "share_masked": (np.abs(sums) > np.log(named.CAP)).mean(),
            "lowest": np.exp(sums.min()), "highest": np.exp(sums.max()),
        })
    table = pd.DataFrame(rows)
    variances = _pooled(everywhere, "pairs").groupby("compared")["log_ratio"].var()
    return table.assign(expected=np.exp(-table["mean_length"] * table["compared"].map(variances)))


def remedies(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """Lay out what truncation and masks touch, of tokens and of whole sequences; all cells text."""
    whole = sequences(everywhere).query("length == length.max()").set_index("compared")
    pairs = _pooled(everywhere, "pairs")
    above = (pairs["log_ratio"] > np.log(named.CAP)).groupby(pairs["compared"]).mean()
    table = whole.assign(tokens=above.reindex(whole.index)).reset_index()
    shares = {
        "tokens truncated": "tokens", "sequences truncated": "share_truncated", "sequences masked": "share_masked",
        "effective": "effective", "effective, truncated": "truncated",
    }
    cells = {name: table[of].map("{:.1%}".format) for name, of in shares.items()}
    ratios = zip(table["lowest"], table["highest"], strict=True)
    cells["sequence ratios"] = [f"{low:.2f} to {high:.2f}" for low, high in ratios]
    return table[["compared", "sequences"]].assign(**cells)
