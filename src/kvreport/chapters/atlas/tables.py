"""Tables of the chapter on the atlas, as its page shows them."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from kvbook.atlas import PADDED, PATHS, WHOLE, table
from kvreport.chapters.atlas.rows import DIFFERENT, REFUSED, invariant

Rows = Iterable[dict[str, Any]]

# What an architecture or a switch can come out as, from the best; the order of every figure.
CACHED, INVARIANT = "cached against full pass", "under row_invariant()"
OUTCOMES = {
    CACHED: (*table.JUDGED[::-1], "no cache", table.NOT_CAUSAL, "does not run"),
    INVARIANT: (table.EXACT, REFUSED, "fails", DIFFERENT),
}
_USUAL = "DynamicCache"


def outcomes(architectures: pd.DataFrame) -> pd.DataFrame:
    """Count architectures by what their cache is, and by what row-invariant arithmetic makes of it."""
    found = {CACHED: architectures["verdict"], INVARIANT: architectures["invariant"]}
    counted = [
        {"question": question, "outcome": outcome, "architectures": int((found[question] == outcome).sum())}
        for question, known in OUTCOMES.items() for outcome in known
    ]
    return pd.DataFrame(counted).query("architectures > 0").reset_index(drop=True)


def counted(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Count architectures by what columns say, such as the path and its outcome."""
    return rows.value_counts(list(columns), sort=False).rename("architectures").reset_index()


def by_processor(paths: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Compare each processor's paths; shows the outcomes that are neither sound nor not tried."""
    recorded = [path for path in PATHS if any((of["path"] == path).any() for of in paths.values())]
    found = {
        processor: [_told(of.loc[of["path"] == path, "outcome"]) for path in recorded]
        for processor, of in paths.items()
    }
    return pd.DataFrame({"path": recorded} | found)


def _told(outcomes: pd.Series) -> str:
    if set(outcomes) <= {table.NOT_RECORDED}:
        return table.NOT_RECORDED
    sound = outcomes.isin((table.EXACT, table.ROUNDING))
    counts = {"exact or rounding": sound.sum()}
    counts |= outcomes[~sound & (outcomes != table.NOT_TRIED)].value_counts().sort_index()
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)


def _drift(row: dict[str, Any], dtype: str) -> float | None:
    """Return the largest drift of the paths that were judged."""
    judged = (path for path in PATHS if row.get(path) in table.JUDGED)
    return max((drift for path in judged for drift in row.get(f"{path}, drift", {}).get(dtype, ())), default=None)


def _operation(row: dict[str, Any], dtype: str) -> str:
    """Name the first operation without its function and the number of tokens, which the rows have."""
    found = row.get(f"first operation, {dtype}", "")
    if row.get(f"first kind, {dtype}") == "fails":
        return "fails"
    # Nearly always in the first layer.
    return (found.rpartition(" (")[0] or found).removeprefix("layer 0, ")


def written(drift: float) -> str:
    """Write a drift with two digits, and none at all as such."""
    return f"{drift:.1e}" if drift else "0"


def linked(architecture: str) -> str:
    """Write an architecture's name as a link to its badge."""
    return f"[{architecture}](../badges/{architecture}.svg){{.external}}"


def survey(rows: Rows) -> pd.DataFrame:
    """Write the atlas, one line an architecture."""
    found = []
    for row in rows:
        remarks = [*table.faults(row), row.get("reason")]
        remarks += [f"{PADDED}: {table.PADDING_CHANGES}"] if row.get(PADDED) == table.PADDING_CHANGES else []
        remarks += [] if row.get("cache", _USUAL) == _USUAL else [f"cache: {row['cache']}"]
        remarks += [] if invariant(row) in (None, table.EXACT) else [row["row_invariant"]]
        left = ", ".join(row.get("dtypes left out", ()))
        found.append({
            "architecture": row["architecture"], "verdict": table.verdict(row),
            "whole prompt cached": row.get(WHOLE, "not tried").removeprefix("prompt "),
            "row-invariant": invariant(row) or "not tried", "first operation, fp32": _operation(row, "float32"),
            "first operation, bf16": _operation(row, "bfloat16"), "drift, fp64": _drift(row, "float64"),
            "remark": "; ".join(filter(None, (*remarks, left and f"not in {left}"))),
        })
    return pd.DataFrame(found)


def bugs(rows: Rows) -> pd.DataFrame:
    """List the paths on which a cache is wrong, each with the first wrong position, or raises an error."""
    found = [
        {"architecture": row["architecture"], "path": path, "outcome": table.error(row, path) or "wrong",
         "declared": "" if table.is_declared(row, path) else "no",
         "first wrong position": row.get(f"{path}, first wrong position"),
         "drift in fp64": max(row.get(f"{path}, drift", {}).get("float64", ()), default=None)}
        for row in rows if table.verdict(row) in (table.BUG, table.RAISES)
        for path in PATHS if row.get(path) in (table.BUG, table.RAISES)
    ]
    return pd.DataFrame(found).astype({"first wrong position": "Int64"})


def compared(against: pd.DataFrame) -> pd.DataFrame:
    """Lay a run's verdicts out beside the published ones."""
    return pd.DataFrame({
        "architecture": against["architecture"], "verdict, published": against["verdict, published"],
        "verdict, this run": against["verdict"], "row-invariant, published": against["invariant, published"],
        "row-invariant, this run": against["invariant"],
        "outcome": against["differs"].map({True: "differs", False: "agrees"}),
    })
