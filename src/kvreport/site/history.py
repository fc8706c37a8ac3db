"""The atlas through the releases of transformers: a mark per architecture and release, and the dated faults it found.

Read from ``data/history.csv.gz``: a line per release and architecture, the outcome and the drift of each path in it.
``tools/history.py`` writes that file from the rows of ``kvbook atlas --transformers``.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook import paths
from kvbook.atlas import CHUNKED, PATHS, WHOLE, table
from kvbook.diagnosis import execution_paths
from kvbook.settings import read_yaml
from kvreport.site.overlay import csv_table

RECORDED, DATED = paths.ROOT / "data" / "history.csv.gz", paths.ROOT / "data" / "dated_faults.yaml"
CAUSES, LINES = paths.ROOT / "data" / "fault_causes.yaml", paths.ROOT / "data" / "model_lines.csv"
NOT_MEASURED, FAILS = "not measured", "does not run"
# What generate does to a whole prompt is not the cache's doing.
JUDGED = tuple(path for path in PATHS if path != WHOLE)
# Releases on which row_invariant() has been tried; on the others it refuses by name.
TRIED = ("5.23.0",)
WRONG = "✗"
# Where the class wants other positions than the atlas gave, and its cache is right.
MISFED = "fed otherwise than meant"
_MARKS = {table.EXACT: "=", table.ROUNDING: "≈", table.BUG: WRONG, table.UNDECIDED: "?", FAILS: "–"}
_OTHER = "○"

Row = Mapping[str, str]


def order(release: str) -> tuple[int, ...]:
    """Return what releases sort by."""
    return tuple(int(part) for part in release.split("."))


def read(file: Path = RECORDED) -> tuple[Row, ...]:
    """Read recorded rows, oldest release first; none where no release is recorded yet."""
    rows = pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records") if file.exists() else []
    known = causes()
    for row in rows:
        misfed = [path for path in wrong(row) if (cause_of(row, path, known) or {}).get("kind") == "ours"]
        row.update(dict.fromkeys(misfed, MISFED))
    return tuple(sorted(rows, key=lambda row: (order(row["release"]), row["architecture"])))


def wrong(row: Row) -> list[str]:
    """List the paths on which a row's cache is wrong."""
    return [path for path in JUDGED if row.get(path) == table.BUG]


def faults(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """List the wrong cells: a row and a path."""
    return [(row, path) for row in rows for path in wrong(row)]


def outcome(row: Row) -> str:
    """Say what an architecture's cache is in one release."""
    if row["status"] != "ran":
        return NOT_MEASURED if row["status"] == NOT_MEASURED else FAILS
    # A path that raises an error is no wrong number: the worst of the numbers counts here.
    kinds = {row.get(path) for path in JUDGED} - {table.RAISES}
    return next((kind for kind in table.JUDGED if kind in kinds), row["cache"] if row["cache"] == "none" else _OTHER)


def mark(row: Row | None) -> str:
    """Write an architecture's cell: one mark, and nothing where the release does not have it yet."""
    return "" if row is None else _MARKS.get(outcome(row), _OTHER)


def spans(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """List how long each fault lived: from which release to which, and the first without it, of those measured."""
    measured: dict[tuple[str, str], list[tuple[str, bool]]] = defaultdict(list)
    for row in rows:
        for path in JUDGED if row["status"] == "ran" else ():
            measured[row["architecture"], path].append((row["release"], path in wrong(row)))
    found = []
    for (architecture, path), cells in sorted(measured.items()):
        runs = [(is_wrong, [release for release, _ in of]) for is_wrong, of in groupby(cells, key=lambda cell: cell[1])]
        for (is_wrong, releases), (_, after) in pairwise([*runs, (False, [None])]):
            if is_wrong:
                lived = {"from": releases[0], "to": releases[-1], "releases": len(releases), "without": after[0]}
                found.append({"architecture": architecture, "path": path} | lived)
    return found


def dated() -> list[dict[str, Any]]:
    """Read the faults that public threads describe."""
    return read_yaml(DATED)


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


def causes() -> list[dict[str, Any]]:
    """Read why caches were wrong."""
    return read_yaml(CAUSES)


def cause_of(row: Row, path: str, known: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the first cause that fits a wrong cell; None where nobody has said why it is wrong."""
    fitting = (one for one in known if row["architecture"] in one["architectures"])
    return next((one for one in fitting if path in one.get("paths", JUDGED)), None)


def _names_in_the_check(path: str) -> set[str]:
    """Return what `kvbook check` calls a path of the atlas."""
    one = execution_paths.of(execution_paths.ATLAS)[path]
    tools = {execution_paths.CHECK, execution_paths.THOROUGH}.intersection(one.tools)
    return {one.called.get(tool, one.name) for tool in tools} | ({"in two parts"} if path == CHUNKED else set())


def known(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """List what `kvbook check` may say of a class: cause, remedy, and the release that fixed each type."""
    lived, found = spans(rows), []
    for one in causes():
        if "remedy" in one:
            reach = one.get("paths", JUDGED)
            mended = {
                span["architecture"]: span["without"] for span in sorted(lived, key=lambda span: order(span["to"]))
                if span["architecture"] in one["architectures"] and span["path"] in reach
            }
            names = sorted(set().union(*map(_names_in_the_check, reach)))
            cause = one["cause"][0].lower() + one["cause"][1:]
            found.append({"cause": cause, "remedy": one["remedy"], "paths": names, "types": mended})
    return found


def explained(rows: Iterable[Row], known: Sequence[Mapping[str, Any]]) -> tuple[list[list[object]], list[str]]:
    """Count the wrong cells of each cause, and list those that have none."""
    cells: dict[int, list[tuple[Row, str]]] = defaultdict(list)
    left: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row, path in faults(rows):
        if (one := cause_of(row, path, known)) is None:
            left[row["architecture"], path].append(row["release"])
        else:
            cells[known.index(one)].append((row, path))
    told: list[list[object]] = [["cause", "kind", "known by", "architectures", "cells", "releases", "read on"]]
    for at, found in sorted(cells.items(), key=lambda each: -len(each[1])):
        one, releases = known[at], sorted({row["release"] for row, _ in found}, key=order)
        names = sorted({row["architecture"] for row, _ in found})
        told.append([
            one["cause"], one["kind"], one["by"], ", ".join(names), len(found), f"{releases[0]} to {releases[-1]}",
            _threads(one["threads"]) or one.get("read", ""),
        ])
    return told, [f"{name} on {path} ({seen[0]} to {seen[-1]})" for (name, path), seen in sorted(left.items())]


def _threads(numbers: Iterable[int]) -> str:
    return ", ".join(f"[{one}](https://github.com/huggingface/transformers/issues/{one})" for one in numbers)


def whole(rows: Iterable[Row]) -> list[str]:
    """List the releases of which every architecture was tried."""
    partly = {row["release"] for row in rows if row["status"] == NOT_MEASURED}
    return [release for release in dict.fromkeys(row["release"] for row in rows) if release not in partly]


def counts(rows: Sequence[Row]) -> list[list[object]]:
    """Count the caches of each release that was measured whole by what they are."""
    lines: list[list[object]] = [["release", "architectures", "wrong", "sound", "fail", "other", "row_invariant()"]]
    for release in whole(rows):
        found = Counter(outcome(row) for row in rows if row["release"] == release)
        told = found[table.BUG], found[table.EXACT] + found[table.ROUNDING], found[FAILS]
        tried = "tried, see the atlas" if release in TRIED else "refuses by name"
        lines.append([release, found.total(), *told, found.total() - sum(told), tried])
    return lines


def stories(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Tell of each architecture in a sentence from which release to which it was wrong, and on which paths."""
    known, threads = causes(), defaultdict(set)
    for fault in dated():
        threads[fault["architecture"], fault["path"]].update(fault["threads"])
    for row, path in faults(rows):
        if one := cause_of(row, path, known):
            threads[row["architecture"], path].update(one["threads"])
    lived: dict[tuple[str, str, str, str | None], list[str]] = defaultdict(list)
    for one in spans(rows):
        lived[one["architecture"], one["from"], one["to"], one["without"]].append(one["path"])
    told = defaultdict(list)
    for (architecture, begun, to, without), at_fault in lived.items():
        said = f"in {begun}" if begun == to else f"from {begun} to {to}"
        numbers = sorted(set().union(*(threads[architecture, path] for path in at_fault)))
        later = "not fixed yet" if to == rows[-1]["release"] else "not measured later"
        end = (f"sound in {without}" if without else later) + (f" ({_threads(numbers)})" if numbers else "")
        told[architecture].append(f"wrong {said} on {', '.join(at_fault)}; {end}")
    return [(architecture, ". ".join(said)) for architecture, said in told.items()]


def lifetimes(rows: Sequence[Row]) -> str:
    """Say in a sentence how long faults lived, in measured releases."""
    ended = sorted(one["releases"] for one in spans(rows) if one["without"])
    if not ended:
        return "No fault is seen to end yet."
    return (
        f"{len(ended)} faults were seen to end, counting each architecture and path once. "
        f"They lived through {ended[len(ended) // 2]} measured releases in the median, and {ended[-1]} at most."
    )


def markdown() -> str:
    """Write the page's tables."""
    rows, told = read(), [["architecture", "path", "outcome", "with and without", "threads"]]
    for one in dated():
        outcome = "; ".join(filter(None, [recall(one, rows), one.get("why")]))
        releases = f"{one['has'] or 'none'} and {one['without'] or 'none yet'}"
        told.append([one["architecture"], one["path"], outcome, releases, _threads(one["threads"])])
    recalled = csv_table("tab-history-recall", "Faults that public threads describe.", told, filtered=True)
    measured = _measured(rows) if rows else ["No release is recorded yet."]
    return "\n\n".join([*measured, "## Dated faults: found or missed", recalled, *_lines()])


def _lines() -> list[str]:
    """Say how much of each model's own source the paths execute."""
    found = pd.read_csv(LINES, dtype=str, keep_default_na=False).query("lines != ''")
    shares = sorted(found["executed"].astype(int) / found["lines"].astype(int))
    told = found[["architecture", "file", "lines", "executed"]]
    return [
        "## How much of each model's source the paths execute",
        "Counted are the lines of the methods that a tiny model has, in its own file, in "
        f"{found['release'].iloc[0]}. In the median of {len(found)} architectures the paths execute "
        f"{shares[len(shares) // 2]:.0%} of them, and {shares[0]:.0%} at least. A fault could hide in what they miss. "
        f"`{LINES.relative_to(paths.ROOT)}` has their numbers.",
        csv_table("tab-history-lines", "Lines of a model's own source that the paths execute.", told, filtered=True),
    ]


def _by_kind(told: Sequence[Sequence[object]]) -> str:
    """Say in a sentence how many wrong cells are not the fault of a cache."""
    cells: Counter[str] = Counter()
    for _cause, kind, by, _names, count, *_ in told[1:]:
        cells.update({kind: count, by: count})
    return (
        f"In {cells['uncached']} of them the pass without a cache is the wrong one, and in {cells['no promise']} a "
        "class takes a cache that it does not promise.\n\n"
        f"Causes are attributed by class and path. Those of {cells['run']} cells were tested, each on one release: the "
        f"one thing was changed, and the fault went. For {cells['report']} a report of ours tests one of the "
        f"classes. For {cells['source']} the release's source was read, and for {cells['thread']} a public thread says "
        "so; these were not tested."
    )


def _measured(rows: Sequence[Row]) -> list[str]:
    releases = whole(rows)
    told, left = explained(rows, causes())
    misfed = sum(row[path] == MISFED for row in rows for path in JUDGED if path in row)
    open_ones = f"Without a cause: {'; '.join(left)}." if left else "Each has a cause in the table."
    cells = {(row["architecture"], row["release"]): row for row in rows}
    faulty = {line[0]: line[2] for line in counts(rows)[1:]}
    worst = max(faulty, key=lambda release: faulty[release]) if faulty else None
    said = (
        f"In {releases[-1]}, the newest, {faulty[releases[-1]]} architectures are wrong on some path; most were in "
        f"{worst}, {faulty[worst]}, and every release has {min(faulty.values())} or more." if worst
        else "No release is measured whole yet."
    )
    # The newest first, for a phone shows few columns; one cell a release for those that were never wrong is too much
    # for a page.
    grid, sound = [["architecture", "wrong on", *releases[::-1]]], [["architecture", "first and last release", "marks"]]
    for architecture in sorted({row["architecture"] for row in rows if row["release"] in releases}):
        found = [cells.get((architecture, release)) for release in releases[::-1]]
        at_fault = dict.fromkeys(path for row in found if row for path in wrong(row))
        if at_fault:
            grid.append([architecture, " · ".join(at_fault), *map(mark, found)])
        else:
            seen = [row for row in found if row]
            marks = ", ".join(f"{times} {one}" for one, times in Counter(map(mark, seen)).items())
            sound.append([architecture, f"{seen[-1]['release']} to {seen[0]['release']}", marks])
    return [
        "## Architectures and releases",
        f"{len(releases)} releases are measured whole. {said} The table begins with the newest. "
        "Search for a name to see a family, or a path to see who was wrong on it.",
        f"Marks: = exact, ≈ rounding, {WRONG} wrong on some path, ? undecided, – does not run, {_OTHER} no cache or a "
        "full pass that is not causal; empty: not there yet.",
        csv_table("tab-history", "Architectures that were ever wrong, by release.", grid, filtered=True),
        csv_table("tab-history-sound", "Architectures that were never wrong, by releases.", sound, filtered=True),
        "## Counts by release",
        csv_table("tab-history-counts", "Architectures of each release by what their cache is.", counts(rows)),
        "## How long a fault lived",
        lifetimes(rows),
        csv_table("tab-history-faults", "Faults by architecture.", [["architecture", "story"], *stories(rows)], True),
        "## Why they were wrong",
        f"{len(faults(rows))} combinations of architecture, release and path are wrong. {open_ones} {_by_kind(told)}",
        f"{misfed} further ones are not counted: the class wants other positions than the atlas gave, and its cache is "
        "right.",
        csv_table("tab-history-causes", "Wrong cells by cause.", told),
    ]
