"""Measure the atlas on other releases of transformers, and gather its rows into the recorded history.

``tools/history.py 5.22.2 5.21.1`` measures these releases one after the other, and writes the history whenever one is
done.  Started again it goes on where it was interrupted.  What was measured of other releases before stays.  With model
types among the words, such as ``zamba2``, these alone are measured.
"""

import ast
import gzip
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook import UserError, paths, releases
from kvbook.atlas import PATHS, table
from kvbook.diagnosis import known
from kvreport.site import history
from kvreport.site.history import NOT_MEASURED, RECORDED

COLUMNS = (
    "release", "torch", "architecture", "cache", "status", "reason", "row_invariant", *PATHS,
    *(f"{path}, drift" for path in PATHS),
)
RELEASES = paths.BUILD / "releases"
# Seconds for one architecture: on a busy machine a slow one is not to look as if it did not run.
LONGEST = "1800"


def listed(release: str) -> list[str]:
    """Read from a release's source which architectures it has, without importing it."""
    source = RELEASES / f"transformers-{release}" / "transformers" / "models" / "auto" / "modeling_auto.py"
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
            return list(dict(ast.literal_eval(node.value.args[0])))
    raise SystemExit(f"{source} lists no causal architectures")


def drift(row: dict[str, Any], path: str) -> str:
    """Return the largest drift of the finest dtype that there is."""
    drifts = row.get(f"{path}, drift", {})
    finest = drifts.get("float64") or next(iter(drifts.values()), ())
    return f"{max(finest):.2g}" if finest else ""


def recorded() -> pd.DataFrame:
    """Read what the history has; no rows where it has none yet."""
    return history.read(RECORDED) if RECORDED.is_file() else pd.DataFrame(columns=COLUMNS)


def gathered(file: Path, release: str) -> list[dict[str, Any]]:
    """Read the rows of one release; of its other architectures what was recorded stays, or a row without outcomes."""
    rows = [table.judged(json.loads(line)) for line in file.read_text("utf-8").splitlines()]
    found = {
        row["architecture"]: row | {"release": release} | {f"{path}, drift": drift(row, path) for path in PATHS}
        for row in rows
    }
    kept = {row["architecture"]: row for row in recorded().to_dict("records") if row["release"] == release} | found
    return [
        kept.get(name, {"release": release, "architecture": name, "status": NOT_MEASURED}) for name in listed(release)
    ]


def write(release: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a release into the history, in place of what it held of it."""
    kept = recorded()
    table = pd.concat([kept[kept["release"] != release], pd.DataFrame(rows, columns=COLUMNS)])
    lines = table.to_csv(index=False, lineterminator="\n")
    # Without a date inside, equal rows are equal bytes.
    RECORDED.write_bytes(gzip.compress(lines.encode("utf-8"), mtime=0))
    made = json.dumps(history.known(history.cells(history.read(RECORDED))), indent=1)
    known.FILE.write_text(made + "\n", encoding="utf-8")


def report(release: str) -> str:
    """Say which caches a release breaks and mends against the newest one before it that was measured whole."""
    cells = history.cells(history.read(RECORDED))
    earlier = [one for one in history.whole(cells) if history.order(one) < history.order(release)]
    wrong = history.wrong(cells).set_index("release")[["architecture", "path"]]
    faults = {one: set(map(tuple, wrong[wrong.index == one].to_numpy())) for one in (release, *earlier[-1:])}
    before = faults[earlier[-1]] if earlier else set()
    lines = [f"# transformers {release}", "", f"Compared with {earlier[-1] if earlier else 'no earlier release'}."]
    parts = {"New": faults[release] - before, "Gone": before - faults[release], "Still there": faults[release] & before}
    for what, found in parts.items():
        lines += ["", f"## {what}: {len(found)}", *(f"- {name}: {path}" for name, path in sorted(found))]
    return "\n".join(lines) + "\n"


def measure(release: str, names: Sequence[str] = ()) -> None:
    """Measure a release, all of its architectures or some, record it and report what is new."""
    start, rows = time.monotonic(), paths.BUILD / "history" / f"{release}.jsonl"
    made = releases.environment(release, RELEASES)
    options = ["--paths-only", "--workers", "1", "--seconds", LONGEST, "--rows", str(rows)]
    try:
        status = releases.run(made, ["atlas", *names, *options])
    except UserError as error:
        failed = {"status": history.FAILS, "reason": str(error)}
        write(release, [{"release": release, "architecture": name, **failed} for name in listed(release)])
        shutil.rmtree(made)
        raise
    if status:
        raise UserError("the atlas does not run there")
    write(release, gathered(rows, release))
    rows.with_suffix(".md").write_text(report(release), encoding="utf-8")
    shutil.rmtree(made)
    print(f"{release}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


def main() -> None:
    """Measure the releases that are named; of one that cannot be imported each row says so."""
    named = [word for word in sys.argv[1:] if not word[0].isdigit()]
    for release in (word for word in sys.argv[1:] if word not in named):
        try:
            measure(release, named)
        except UserError as error:
            print(f"{release}: {error}", flush=True)


if __name__ == "__main__":
    main()
