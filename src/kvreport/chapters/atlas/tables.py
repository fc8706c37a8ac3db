"""Tables of the chapter on the atlas."""

import json
from typing import Any

import pandas as pd

from kvbook.atlas import columns, table
from kvbook.atlas.feeding import PATHS
from kvbook.runs.records import Run

Rows = list[dict[str, Any]]

EXACT, ROUNDING, BUG, REFUSED, DIFFERENT = "exact", "rounding", "bug", "refused", "different"
# What an architecture, a path or a switch can come out as, from the best; the order of every figure.
CACHED, INVARIANT = "cached against full pass", "under row_invariant()"
OUTCOMES = {
    CACHED: (EXACT, ROUNDING, "undecided", BUG, "no cache", "not causal", "does not run"),
    INVARIANT: (EXACT, REFUSED, "fails", DIFFERENT),
}
NOT_ASKED = "not applicable"
_USUAL = "DynamicCache"


def rows(run: Run) -> Rows:
    """Give a run's rows as the atlas makes them, by architecture, with the versions that they depend on."""
    versions = {name: run.about["machine"][name] for name in ("transformers", "torch")}
    found = [
        {key: value for key, value in row.items() if not pd.isna(value)} | versions
        for row in run.rows.to_dict("records")
    ]
    for row in found:
        row |= {key: json.loads(value) for key, value in row.items() if str(value).startswith("{")}
        row |= {key: int(value) for key, value in row.items() if key.endswith("position") or key == "parameters"}
    return sorted(found, key=lambda row: row["architecture"])


def invariant(row: dict[str, Any]) -> str | None:
    """Say in a word what row-invariant arithmetic makes of an architecture; None where it was not tried."""
    return row["row_invariant"].split(":")[0] if "row_invariant" in row else None


def outcomes(rows: Rows) -> pd.DataFrame:
    """Count architectures by what their cache is, and by what row-invariant arithmetic makes of it."""
    found = {CACHED: [table.verdict(row) for row in rows], INVARIANT: [invariant(row) for row in rows]}
    counted = [
        {"question": question, "outcome": outcome, "architectures": found[question].count(outcome)}
        for question, known in OUTCOMES.items()
        for outcome in known
    ]
    return pd.DataFrame(counted).query("architectures > 0").reset_index(drop=True)


def _of_path(row: dict[str, Any], path: str) -> str:
    found = str(row.get(path, NOT_ASKED))
    return found if found in (EXACT, ROUNDING, "undecided", BUG, "padding counts") else NOT_ASKED


def by_path(rows: Rows) -> pd.DataFrame:
    """Count, for each execution path, what causal architectures with a cache give on it."""
    asked = [row for row in rows if table.verdict(row) in (EXACT, ROUNDING, "undecided", BUG)]
    found = pd.DataFrame([{"path": path, "outcome": _of_path(row, path)} for path in PATHS for row in asked])
    return found.value_counts(["path", "outcome"], sort=False).rename("architectures").reset_index()


def first_operations(rows: Rows) -> pd.DataFrame:
    """Count the kinds of the first operation whose result for a token depends on how many come with it, by dtype."""
    found = [
        {"dtype": dtype, "kind": row[f"first kind, {dtype}"]}
        for dtype in columns.SWITCHED
        for row in rows
        if f"first kind, {dtype}" in row and row[f"first kind, {dtype}"] != "fails"
    ]
    return pd.DataFrame(found).value_counts(["dtype", "kind"], sort=False).rename("architectures").reset_index()


def _drift(row: dict[str, Any], dtype: str) -> float | None:
    """Give the largest drift of the paths that were judged."""
    judged = (path for path in PATHS if row.get(path) in (EXACT, ROUNDING, "undecided", BUG))
    drifts = [row.get(f"{path}, drift", {}).get(dtype) for path in judged]
    return max((drift for drift in drifts if drift is not None), default=None)


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
        kind = table.verdict(row)
        remark = "; ".join(table.wrong_paths(row)) if kind == BUG else row.get("reason", "")
        cache = "" if row.get("cache", _USUAL) == _USUAL else f"cache: {row['cache']}"
        refused = "" if invariant(row) in (None, EXACT) else row["row_invariant"]
        left = ", ".join(row.get("dtypes left out", ()))
        remark = "; ".join(filter(None, (remark, cache, refused, left and f"not in {left}")))
        found.append(
            {
                "architecture": row["architecture"],
                "verdict": kind,
                "row-invariant": invariant(row) or "not tried",
                "first operation, fp32": _operation(row, "float32"),
                "first operation, bf16": _operation(row, "bfloat16"),
                "drift, fp64": _drift(row, "float64"),
                "remark": remark,
            }
        )
    return pd.DataFrame(found)


def bugs(rows: Rows) -> pd.DataFrame:
    """List the architectures whose cache is wrong, with the paths and the first wrong position of each."""
    found = [
        {"architecture": row["architecture"], "path": path, "first wrong position": row[f"{path}, first wrong position"],
         "drift in fp64": row[f"{path}, drift"].get("float64")}
        for row in rows if table.verdict(row) == BUG
        for path in PATHS if row.get(path) == BUG
    ]  # fmt: skip
    return pd.DataFrame(found, columns=["architecture", "path", "first wrong position", "drift in fp64"])


def compared(own: Rows, published: Rows) -> pd.DataFrame:
    """Set a run's verdicts beside the published ones of the same architectures."""
    known = {row["architecture"]: row for row in published}
    found = []
    for row in own:
        if (other := known.get(row["architecture"])) is None:
            continue
        here, there = ((table.verdict(each), invariant(each) or "not tried") for each in (row, other))
        found.append(
            {
                "architecture": row["architecture"],
                "verdict, published": there[0], "verdict, this run": here[0],
                "row-invariant, published": there[1], "row-invariant, this run": here[1],
                "outcome": "agrees" if here == there else "differs",
            }
        )  # fmt: skip
    return pd.DataFrame(found)
