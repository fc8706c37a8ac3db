"""Gather rows of ``kvbook atlas --transformers`` into the recorded history: ``tools/history.py ROWS.jsonl ...``."""

import ast
import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

from kvbook import paths
from kvbook.atlas import table
from kvbook.atlas.names import PATHS
from kvreport.site.history import NOT_MEASURED, RECORDED

COLUMNS = (
    "release", "torch", "architecture", "cache", "status", "reason", "row_invariant", *PATHS,
    *(f"{path}, drift" for path in PATHS),
)
RELEASES = paths.BUILD / "releases"


def listed(release: str) -> list[str]:
    """Read from a release's source which architectures it has, without importing it."""
    source = RELEASES / f"transformers-{release}" / "transformers" / "models" / "auto" / "modeling_auto.py"
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
            return list(dict(ast.literal_eval(node.value.args[0])))
    raise SystemExit(f"{source} lists no causal architectures")


def drift(row: dict[str, Any], path: str) -> str:
    """Return the largest drift of the finest dtype that there is."""
    drifts = next(iter(row.get(f"{path}, drift", {}).values()), ())
    return f"{max(drifts):.2g}" if drifts else ""


def gathered(file: Path) -> list[dict[str, Any]]:
    """Read the rows of one release; its architectures that are not among them are there without outcomes."""
    rows = [table.judged(json.loads(line)) for line in file.read_text("utf-8").splitlines()]
    release = rows[0]["transformers"]
    found = {
        row["architecture"]: row | {"release": release} | {f"{path}, drift": drift(row, path) for path in PATHS}
        for row in rows
    }
    return [
        found.get(name, {"release": release, "architecture": name, "status": NOT_MEASURED}) for name in listed(release)
    ]


def main() -> None:
    """Write the history from the files that are named."""
    rows = [row for name in sys.argv[1:] for row in gathered(Path(name))]
    lines = io.StringIO()
    writer = csv.DictWriter(lines, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    # Without a date inside, equal rows are equal bytes.
    RECORDED.write_bytes(gzip.compress(lines.getvalue().encode("utf-8"), mtime=0))


if __name__ == "__main__":
    main()
