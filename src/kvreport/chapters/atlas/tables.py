"""Tables of the chapter on the atlas."""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvbook.atlas import columns, table
from kvbook.atlas.feeding import PADDED, PADDING_COUNTS, PATHS, WHOLE
from kvbook.runs.records import Run

Rows = list[dict[str, Any]]

REFUSED, DIFFERENT = "refused", "different"
# What an architecture or a switch can come out as, from the best; the order of every figure.
CACHED, INVARIANT = "cached against full pass", "under row_invariant()"
OUTCOMES = {
    CACHED: (*table.JUDGED[::-1], "no cache", table.NOT_CAUSAL, "does not run"),
    INVARIANT: (table.EXACT, REFUSED, "fails", DIFFERENT),
}
_USUAL = "DynamicCache"
_TELLS_NOTHING = ("not applicable: takes no position_ids", "right", "other tokens")


def rows(run: Run) -> Rows:
    """Give a run's rows as the atlas makes them, by architecture and judged, with the versions that they depend on."""
    versions = {name: run.about["machine"][name] for name in ("transformers", "torch")}
    found = [
        {key: value for key, value in row.items() if not pd.isna(value)} | versions
        for row in run.rows.to_dict("records")
    ]
    for row in found:
        row |= {key: json.loads(value) for key, value in row.items() if str(value).startswith("{")}
        row |= {key: int(value) for key, value in row.items() if key.endswith(("position", "tokens fed", "parameters"))}
        if "chunks" in row:
            _of_one_word(row)
    return sorted(map(table.judged, found), key=lambda row: row["architecture"])


def _of_one_word(row: dict[str, Any]) -> None:
    """Read a row from before each dtype kept its outcome: a word for each path, and one failure for all dtypes.

    What such a word does not tell is left out: it reads "not recorded there".
    """
    words = {path: row.pop(path) for path in PATHS if path in row}
    for path, word in words.items():
        reason = word.removeprefix("not applicable").lstrip(": ")
        # One dtype's failure stood for all, and tokens that agree by chance for a path that is right.
        if (reason == PADDING_COUNTS and words[PADDED] in (table.EXACT, table.ROUNDING)) or word in _TELLS_NOTHING:
            continue
        if f"{path}, drift" in row:
            row[f"{path}, drift"] = {dtype: [drift] for dtype, drift in row[f"{path}, drift"].items()}
            row |= {f"{path}, declared": False} if word == "wrong, and not declared" else {}
        elif word == "fed twice":
            # The prompt of those runs.
            row[f"{path}, tokens fed"] = 10
        elif reason == word or reason.startswith("raises"):
            row[f"{path}, error"] = {"": reason.removeprefix("raises ")}
        else:
            row[f"{path}, not tried"] = {"": reason}


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


def by_path(rows: Rows) -> pd.DataFrame:
    """Count, for each execution path, what causal architectures with a cache give on it."""
    asked = [row for row in rows if table.verdict(row) in table.JUDGED]
    found = pd.DataFrame(
        [{"path": path, "outcome": row.get(path, table.NOT_RECORDED)} for path in PATHS for row in asked]
    )
    return found.value_counts(["path", "outcome"], sort=False).rename("architectures").reset_index()


def by_processor(rows: Mapping[str, Rows]) -> pd.DataFrame:
    """Set the paths of each processor's rows beside one another; of the outcomes, those that are neither sound nor not tried."""
    found: dict[str, dict[str, str]] = {path: {"path": path} for path in PATHS}
    for processor, of in rows.items():
        counted = by_path(of).pivot(index="path", columns="outcome", values="architectures").fillna(0).astype(int)
        for path, line in found.items():
            counts = {outcome: count for outcome, count in counted.loc[path].items() if count}
            if set(counts) == {table.NOT_RECORDED}:
                line[processor] = table.NOT_RECORDED
                continue
            sound = counts.pop(table.EXACT, 0) + counts.pop(table.ROUNDING, 0)
            counts.pop(table.NOT_TRIED, None)
            told = {"exact or rounding": sound} | counts
            line[processor] = ", ".join(f"{count} {outcome}" for outcome, count in told.items() if count)
    return pd.DataFrame(found.values())


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
        remark = "; ".join(filter(None, (*remarks, left and f"not in {left}")))
        found.append(
            {
                "architecture": row["architecture"],
                "verdict": table.verdict(row),
                "whole prompt cached": row.get(WHOLE, "not tried").removeprefix("prompt "),
                "row-invariant": invariant(row) or "not tried",
                "first operation, fp32": _operation(row, "float32"),
                "first operation, bf16": _operation(row, "bfloat16"),
                "drift, fp64": _drift(row, "float64"),
                "remark": remark,
            }
        )
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
    ]  # fmt: skip
    return pd.DataFrame(found).astype({"first wrong position": "Int64"})


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
