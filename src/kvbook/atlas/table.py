"""The atlas as a table: one line per architecture, counts below, and files for other programs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook.atlas.feeding import PATHS
from kvbook.errors import UserError

# What a path can be, from the worst; the first that occurs is an architecture's verdict.
_KINDS = ("bug", "undecided", "rounding", "exact")
FORMATS = (".csv", ".json")


def verdict(row: dict[str, Any]) -> str:
    """Give the worst that an architecture's cache is on any path, and where it first is wrong."""
    if row.get("status") != "ran":
        return "does not run"
    if row["cache"] == "none" or row["cache"].startswith("raises"):
        return "no cache"
    if not row["causal"]:
        return "not causal"
    kinds = [row.get(path) for path in PATHS]
    return next((kind for kind in _KINDS if kind in kinds), "undecided")


def wrong_paths(row: dict[str, Any]) -> list[str]:
    """List the paths on which an architecture's cache is wrong, each with its first wrong position."""
    return [
        f"{path} from {row[f'{path}, first wrong position']}"
        for path in PATHS
        if row.get(path) == "bug" and f"{path}, first wrong position" in row
    ]


def line(row: dict[str, Any]) -> str:
    """Say in one line what an architecture's cache does."""
    kind = verdict(row)
    if kind == "does not run":
        return f"{row['architecture']:26s} {kind:12s} {row.get('reason', '')}"
    detail = "; ".join(wrong_paths(row))
    parts = [
        f"{row['architecture']:26s} {kind:12s}",
        f"{row['cache']:20s}",
        row.get("row_invariant", "not tried"),
        detail,
    ]
    return " ".join(part for part in parts if part)


def counts(rows: list[dict[str, Any]]) -> list[str]:
    """Count the verdicts, and what row-invariant arithmetic makes of those that run."""
    ran = [row for row in rows if row.get("status") == "ran"]
    kinds = Counter(verdict(row) for row in rows)
    invariant = Counter(row["row_invariant"].split(":")[0] for row in ran if "row_invariant" in row)
    return [
        f"{len(rows)} architectures, {len(ran)} run: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()),
        "under row_invariant(): " + ", ".join(f"{n} {kind}" for kind, n in invariant.most_common()),
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
    ordered = sorted(rows, key=lambda row: row["architecture"])
    if path.suffix == ".json":
        content = json.dumps([row | {"verdict": verdict(row)} for row in ordered], indent=1) + "\n"
    else:
        flat = [
            {
                key: json.dumps(value) if isinstance(value, dict) else value
                for key, value in (row | {"verdict": verdict(row)}).items()
            }
            for row in ordered
        ]
        content = pd.DataFrame(flat).to_csv(index=False)
    # Written beside it and moved, so that nothing is there by halves.
    beside = path.with_name(path.name + ".part")
    beside.write_text(content)
    beside.replace(path)
