"""The atlas through the releases of transformers: a mark per architecture and release, and the dated faults it found.

Read from ``data/history.csv.gz``: a line per release and architecture, the outcome and the drift of each path in it.
``tools/history.py`` writes that file from the rows of ``kvbook atlas --transformers``.
"""

import csv
import functools
import gzip
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import yaml

from kvbook import paths
from kvbook.atlas import table
from kvbook.atlas.names import PATHS, WHOLE
from kvreport.publishing.wording import listed
from kvreport.site.overlay import csv_table

RECORDED, DATED = paths.ROOT / "data" / "history.csv.gz", paths.ROOT / "data" / "dated_faults.yaml"
NOT_MEASURED, FAILS = "not measured", "does not run"
# What generate does to a whole prompt is not the cache's doing.
JUDGED = tuple(path for path in PATHS if path != WHOLE)
_LETTERS: dict[str, str] = {}
for _path in JUDGED:
    # The first of its own letters that is free, so that a new path has one too.
    _LETTERS[_path] = next(one for one in _path + ascii_lowercase if one.isalpha() and one not in _LETTERS.values())
_MARKS = {table.EXACT: "=", table.ROUNDING: "≈", table.UNDECIDED: "?", NOT_MEASURED: "·", FAILS: "–"}
_OTHER = "○"
_THREAD = "[{0}](https://github.com/huggingface/transformers/issues/{0})"

Row = Mapping[str, str]


def order(release: str) -> tuple[int, ...]:
    """Return what releases sort by."""
    return tuple(int(part) for part in release.split("."))


@functools.cache
def recorded() -> tuple[Row, ...]:
    """Read the recorded rows, oldest release first; none where no release is recorded yet."""
    if not RECORDED.exists():
        return ()
    with gzip.open(RECORDED, "rt", encoding="utf-8", newline="") as file:
        return tuple(sorted(csv.DictReader(file), key=lambda row: (order(row["release"]), row["architecture"])))


def wrong(row: Row) -> list[str]:
    """List the paths on which a row's cache is wrong."""
    return [path for path in JUDGED if row.get(path) == table.BUG]


def outcome(row: Row) -> str:
    """Say what an architecture's cache is in one release."""
    if row["status"] != "ran":
        return NOT_MEASURED if row["status"] == NOT_MEASURED else FAILS
    # A path that raises an error is no wrong number: the worst of the numbers counts here.
    kinds = {row.get(path) for path in JUDGED} - {table.RAISES}
    return next((kind for kind in table.JUDGED if kind in kinds), row["cache"] if row["cache"] == "none" else _OTHER)


def mark(row: Row | None) -> str:
    """Write an architecture's cell: nothing where the release does not have it yet."""
    if row is None:
        return ""
    kind = outcome(row)
    return f"✗ {''.join(_LETTERS[path] for path in wrong(row))}" if kind == table.BUG else _MARKS.get(kind, _OTHER)


def spans(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """List how long each fault lived: from which release to which, and the first without it, of those measured."""
    measured: dict[tuple[str, str], list[tuple[str, bool]]] = defaultdict(list)
    for row in rows:
        for path in JUDGED if row["status"] == "ran" else ():
            measured[row["architecture"], path].append((row["release"], path in wrong(row)))
    found = []
    for (architecture, path), cells in sorted(measured.items()):
        begun = None
        for at, (release, is_wrong) in enumerate(cells):
            if is_wrong and begun is None:
                begun = at
            if begun is not None and (not is_wrong or at == len(cells) - 1):
                last = at if is_wrong else at - 1
                found.append({
                    "architecture": architecture, "path": path, "from": cells[begun][0], "to": cells[last][0],
                    "releases": last - begun + 1, "without": None if is_wrong else release,
                })
                begun = None
    return found


def dated() -> list[dict[str, Any]]:
    """Read the faults that public threads describe."""
    return yaml.safe_load(DATED.read_text("utf-8"))


def recall(fault: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """Say whether the atlas found a dated fault, or why not."""
    if fault["path"] not in PATHS:
        return "missed: the atlas has no such path"
    cells = {row["release"]: row for row in rows if row["architecture"] == fault["architecture"]}
    wanted = [release for release in (fault["has"], fault["without"]) if release]
    if missing := [one for one in wanted if one not in cells or cells[one]["status"] == NOT_MEASURED]:
        return f"not measured yet in {' and '.join(missing)}"
    if failed := [release for release in wanted if cells[release]["status"] != "ran"]:
        return f"missed: does not run in {' and '.join(failed)}"
    told = {release: cells[release][fault["path"]] for release in wanted}
    healed = fault["without"] is None or told[fault["without"]] != table.BUG
    if fault["has"] is None:
        return "no false alarm" if healed else "false alarm"
    if told[fault["has"]] == table.BUG:
        return "found" if healed else f"found, and still there in {fault['without']}"
    return f"missed: {told[fault['has']]} in {fault['has']}"


def _threads(numbers: Iterable[int]) -> str:
    return ", ".join(_THREAD.format(number) for number in numbers)


def counts(rows: Iterable[Row]) -> list[list[object]]:
    """Count the caches of each release by what they are."""
    by_release: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_release[row["release"]].append(row)
    kinds = (table.EXACT, table.ROUNDING, table.UNDECIDED, table.BUG, FAILS, NOT_MEASURED)
    lines: list[list[object]] = [["release", "architectures", *kinds, "other", "row_invariant()"]]
    for release, of_release in by_release.items():
        found = Counter(map(outcome, of_release))
        invariant = Counter(row["row_invariant"].split(":")[0] or "not tried" for row in of_release)
        said = ", ".join(f"{count} {kind}" for kind, count in invariant.most_common()) if len(invariant) > 1 else None
        lines.append([
            release, len(of_release), *(found[kind] for kind in kinds),
            len(of_release) - sum(found[kind] for kind in kinds), said or next(iter(invariant)),
        ])
    return lines


def markdown() -> str:
    """Write the page's tables."""
    rows = recorded()
    told = [["architecture", "path", "kind", "has it", "does not", "outcome", "threads"]]
    told += [
        [one["architecture"], one["path"], one["kind"], one["has"] or "none", one["without"] or "none yet",
         recall(one, rows), _threads(one["threads"])]
        for one in dated()
    ]
    recalled = [
        "## Dated faults: found or missed",
        csv_table("tab-history-recall", "Faults that public threads describe.", told, filtered=True),
    ]
    return "\n\n".join([*(_measured(rows) if rows else ["No release is recorded yet."]), *recalled])


def _measured(rows: Sequence[Row]) -> list[str]:
    releases = list(dict.fromkeys(row["release"] for row in rows))
    cells = {(row["architecture"], row["release"]): row for row in rows}
    healers = {(one["architecture"], one["path"]): one["threads"] for one in dated()}
    grid = [["architecture", "wrong on", *releases]]
    for architecture in sorted({row["architecture"] for row in rows}):
        marks = [cells.get((architecture, release)) for release in releases]
        at_fault = dict.fromkeys(path for row in marks if row for path in wrong(row))
        grid.append([architecture, ", ".join(at_fault), *map(mark, marks)])
    lived = [["architecture", "path", "from", "to", "measured releases", "first without", "threads"]]
    lived += [
        [one["architecture"], one["path"], one["from"], one["to"], one["releases"],
         one["without"] or ("none yet" if one["to"] == releases[-1] else "not measured"),
         _threads(healers.get((one["architecture"], one["path"]), ()))]
        for one in spans(rows)
    ]
    partly = {row["release"] for row in rows if row["status"] == NOT_MEASURED}
    whole = [release for release in releases if release not in partly]
    letters = ", ".join(f"{letter} {path}" for path, letter in _LETTERS.items())
    return [
        "## Architectures and releases",
        f"Measured whole so far: {listed(whole) or 'none'}. Of the {len(partly)} other releases here only those "
        "architectures ran of which a public thread describes a fault; the rest of the releases follow.",
        f"Marks: = exact, ≈ rounding, ✗ wrong on the paths whose letters follow, ? undecided, – does not run, "
        f"· not measured, {_OTHER} no cache or not causal; empty: not there yet. Letters: {letters}.",
        csv_table("tab-history", "What each release's caches are.", grid, filtered=True),
        "## Counts by release",
        csv_table("tab-history-counts", "Architectures of each release by what their cache is.", counts(rows)),
        "## How long a fault lived",
        csv_table("tab-history-faults", "Faults, by architecture and path.", lived, filtered=True),
    ]
