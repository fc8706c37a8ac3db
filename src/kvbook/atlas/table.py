"""The atlas as a table: one line per architecture, counts below, and files for other programs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook import UserError, paths
from kvbook.atlas import PADDED, PATHS, RIGHT, STATIC, WHOLE
from kvbook.diagnosis.outcome import PADDING_COUNTS
from kvbook.diagnosis.verdict import kind_of

EXACT, ROUNDING, UNDECIDED, BUG, RAISES = "exact", "rounding", "undecided", "bug", "raises an error"
# Outcomes of a path that are not the cache's doing, and those of a path that was not tried.
FED_TWICE, PADDING_CHANGES, NOT_CAUSAL = "prompt fed twice", "full pass changes", "not causal"
NOT_TRIED, NOT_RECORDED = "not applicable", "not recorded there"
# The first that occurs on a path is an architecture's verdict.
JUDGED = (BUG, RAISES, UNDECIDED, ROUNDING, EXACT)
FORMATS = (".csv", ".json")


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """Add the outcome of each path to a row, from the drifts, errors and reasons that it records."""
    return row | {path: _outcome(row, path) for path in PATHS} if row.get("status") == "ran" else row


def _outcome(row: dict[str, Any], path: str) -> str:
    drift, reasons = row.get(f"{path}, drift"), row.get(f"{path}, not tried", {})
    # In bf16 the full pass hides that padding changes it.
    if PADDING_COUNTS in reasons.values() and (path == RIGHT or _outcome(row, PADDED) == PADDING_CHANGES):
        return PADDING_CHANGES
    kind = kind_of(drift) if drift else None
    if row["causal"]:
        if path == WHOLE and row.get(f"{path}, tokens fed", 0) > 1 and kind in (BUG, None):
            return FED_TWICE
        if kind == BUG:
            # Padding at once is a full pass: no cache takes part.
            return PADDING_CHANGES if path == PADDED else BUG
    if row.get(f"{path}, error"):
        return RAISES
    if kind:
        return kind if row["causal"] else NOT_CAUSAL
    return NOT_TRIED if reasons else NOT_RECORDED


def verdict(row: dict[str, Any]) -> str:
    """Return the worst outcome on any path; what `generate` does to a whole prompt is not the cache's doing."""
    if row.get("status") != "ran":
        return "does not run"
    if row["cache"] == "none":
        return "no cache"
    if not row["causal"]:
        return NOT_CAUSAL
    kinds = {row.get(path) for path in PATHS}
    return next((kind for kind in JUDGED if kind in kinds), UNDECIDED)


def is_declared(row: dict[str, Any], path: str) -> bool:
    """Tell whether a class promises a path; what it says of static caches stands in its row."""
    return path != STATIC or bool(row.get(f"{path}, declared", True))


def faults(row: dict[str, Any]) -> list[str]:
    """List the paths on which an architecture's cache is wrong, each from where, and those that raise an error."""
    found = []
    for path in PATHS:
        if row.get(path) == BUG:
            where = row.get(f"{path}, first wrong position")
            said = f"{path}: wrong" if where is None else f"{path}: wrong from token {where}"
        elif row.get(path) == RAISES:
            said = f"{path} raises {error(row, path).partition(':')[0]}"
        else:
            continue
        found.append(said if is_declared(row, path) else f"{said} (not declared)")
    return found


def error(row: dict[str, Any], path: str) -> str:
    """Return the error that a path raised, of the finest dtype in which it did."""
    return next(iter(row.get(f"{path}, error", {}).values()), "")


def line(row: dict[str, Any]) -> str:
    """Say in one line what an architecture's cache does."""
    kind = verdict(row)
    if kind == "does not run":
        return f"{row['architecture']:26s} {kind:15s} {row.get('reason', '')}"
    said = f"{row['architecture']:26s} {kind:15s} {row['cache']:20s} {row.get('row_invariant', 'not tried')}"
    return " ".join([said, *filter(None, ["; ".join(faults(row))])])


def counts(rows: list[dict[str, Any]]) -> list[str]:
    """Count the verdicts, what `generate` does to a whole prompt, and what row-invariant arithmetic makes of them."""
    said = f"{len(rows)} architecture{'s' * (len(rows) != 1)}"
    found = {
        said: [verdict(row) for row in rows],
        WHOLE: [row[WHOLE] for row in rows if WHOLE in row],
        "under row_invariant()": [row["row_invariant"].split(":")[0] for row in rows if "row_invariant" in row],
    }
    return [
        f"{what}: " + ", ".join(f"{n} {kind}" for kind, n in Counter(kinds).most_common())
        for what, kinds in found.items() if kinds
    ]


def text(rows: list[dict[str, Any]]) -> str:
    """Write the table out, in the order of the names, with the counts below."""
    return "\n".join([*(line(row) for row in sorted(rows, key=lambda row: row["architecture"])), *counts(rows)])


def check_format(path: Path) -> None:
    """Refuse a file of another kind before anything is measured."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path} is neither {' nor '.join(FORMATS)}: name a file that ends so")


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the rows for another program, as the file's name says: CSV, or JSON with nested drifts."""
    check_format(path)
    ordered = [row | {"verdict": verdict(row)} for row in sorted(rows, key=lambda row: row["architecture"])]
    if path.suffix == ".json":
        content = json.dumps(ordered, indent=1) + "\n"
    else:
        flat = pd.DataFrame(ordered).map(lambda value: json.dumps(value) if isinstance(value, dict) else value)
        content = flat.to_csv(index=False)
    paths.keep(path, content.encode())
