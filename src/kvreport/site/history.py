"""The atlas through the releases of transformers: a mark per architecture and release, and the dated faults it found.

Read from ``data/history.csv.gz``: a line per release and architecture, the outcome and the drift of each path in it.
``tools/history.py`` writes that file from the rows of ``kvbook atlas --transformers``.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
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
# Where the class wants other positions than the atlas gave, and its cache is right.
MISFED = "fed otherwise than meant"
OTHER = "other"
# The worst first. A path that raises an error is no wrong number, and not among them.
MARKS = {
    NOT_MEASURED: "", FAILS: "–", table.BUG: "✗", table.UNDECIDED: "?", table.ROUNDING: "≈", table.EXACT: "=",
    OTHER: "○",
}
# What tells the cells of a release apart.
_CELL = ["architecture", "path"]


def order(release: str) -> tuple[int, ...]:
    """Return what releases sort by."""
    return tuple(int(part) for part in release.split("."))


def read(file: Path = RECORDED) -> pd.DataFrame:
    """Read recorded rows, oldest release first."""
    rows = pd.read_csv(file, dtype=str, keep_default_na=False).sort_values("architecture")
    return rows.sort_values("release", key=lambda of: of.map(order), kind="stable", ignore_index=True)


def causes() -> pd.DataFrame:
    """Read why caches were wrong: a line for each architecture and path of a cause."""
    found = pd.DataFrame(read_yaml(CAUSES)).rename(columns={"architectures": "architecture", "paths": "path"})
    found["path"] = [given if isinstance(given, list) else JUDGED for given in found["path"]]
    return found.explode("architecture").explode("path").fillna("")


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Lay rows out, a line a path: what came out there, and with it what is known of the first cause that fits."""
    found = rows.melt(["release", "architecture", "status"], JUDGED, "path", "outcome", ignore_index=False)
    found = found.sort_index(kind="stable").merge(causes().drop_duplicates(_CELL), "left", _CELL)
    is_misfed = (found["outcome"] == table.BUG) & (found["kind"] == "ours")
    known = [found["status"] == NOT_MEASURED, found["status"] != "ran", is_misfed]
    return found.assign(outcome=np.select(known, [NOT_MEASURED, FAILS, MISFED], found["outcome"]))


def wrong(cells: pd.DataFrame) -> pd.DataFrame:
    """Keep the cells in which a cache is wrong."""
    return cells[cells["outcome"] == table.BUG]


def outcomes(cells: pd.DataFrame) -> pd.Series:
    """Say what an architecture's cache is in a release: the worst on any path."""
    kinds = cells["outcome"].where(cells["outcome"].isin(MARKS), OTHER)
    ranked = kinds.astype(pd.CategoricalDtype(list(MARKS), ordered=True))
    return ranked.groupby([cells["architecture"], cells["release"]]).min().astype(str)


def spans(cells: pd.DataFrame) -> pd.DataFrame:
    """List how long each fault lived: from which release to which, and the first without it, of those measured."""
    found = cells[cells["status"] == "ran"].sort_values(_CELL, kind="stable")
    found["without"] = found.groupby(_CELL)["release"].shift(-1, fill_value="")
    state = found[_CELL].assign(wrong=found["outcome"] == table.BUG)
    turn = (state != state.shift()).any(axis=1).cumsum().rename("turn")
    told = {"from": ("release", "first"), "to": ("release", "last"), "releases": ("release", "size")}
    return found[state["wrong"]].groupby([*_CELL, turn]).agg(**told, without=("without", "last")).reset_index()


def dated() -> list[dict[str, Any]]:
    """Read the faults that public threads describe."""
    return read_yaml(DATED)


def recall(fault: Mapping[str, Any], cells: pd.DataFrame) -> str:
    """Say whether the atlas found a dated fault, or why not."""
    if fault["path"] not in JUDGED:
        return "missed: the atlas has no such path"
    here = cells[cells["architecture"] == fault["architecture"]]
    found = here[here["path"] == fault["path"]].set_index("release")["outcome"]
    told = {release: found.get(release, NOT_MEASURED) for release in (fault["has"], fault["without"]) if release}
    if missing := [release for release, outcome in told.items() if outcome == NOT_MEASURED]:
        return f"not measured yet in {' and '.join(missing)}"
    if failed := [release for release, outcome in told.items() if outcome == FAILS]:
        return f"missed: does not run in {' and '.join(failed)}"
    healed = fault["without"] is None or told[fault["without"]] != table.BUG
    if fault["has"] is None:
        return "no false alarm" if healed else "false alarm"
    if told[fault["has"]] == table.BUG:
        return "found" if healed else f"found, and still there in {fault['without']}"
    return f"missed: {told[fault['has']]} in {fault['has']}"


def _names_in_the_check(path: str) -> set[str]:
    """Return what `kvbook check` calls a path of the atlas."""
    one = execution_paths.of(execution_paths.ATLAS)[path]
    tools = {execution_paths.CHECK, execution_paths.THOROUGH}.intersection(one.tools)
    return {one.called.get(tool, one.name) for tool in tools} | ({"in two parts"} if path == CHUNKED else set())


def known(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """List what `kvbook check` may say of a class: cause, remedy, and the release that fixed each type."""
    lived = spans(cells).sort_values("to", key=lambda of: of.map(order), kind="stable")
    found = []
    for (cause, remedy), of in causes().query("remedy != ''").groupby(["cause", "remedy"], sort=False):
        mended = lived.merge(of, on=_CELL)
        types = {name: release or None for name, release in zip(mended["architecture"], mended["without"], strict=True)}
        names = sorted(set().union(*map(_names_in_the_check, of["path"])))
        found.append({"cause": cause[0].lower() + cause[1:], "remedy": remedy, "paths": names, "types": types})
    return found


def explained(faults: pd.DataFrame) -> tuple[list[list[object]], list[str]]:
    """Count the wrong cells of each cause, and list those that have none."""
    told = [["cause", "kind", "known by", "architectures", "cells", "releases", "read on"]]
    causes = faults.groupby(["cause", "kind", "by", "read"], sort=False)
    for (cause, kind, by, read), of in sorted(causes, key=lambda each: -len(each[1])):
        names = ", ".join(sorted(set(of["architecture"])))
        told.append([cause, kind, by, names, len(of), _from_to(of), _threads(of["threads"].iloc[0]) or read])
    left = [f"{name} on {path} ({_from_to(of)})" for (name, path), of in faults[faults["cause"].isna()].groupby(_CELL)]
    return told, left


def _from_to(cells: pd.DataFrame) -> str:
    return f"{cells['release'].iloc[0]} to {cells['release'].iloc[-1]}"


def _threads(numbers: Iterable[int]) -> str:
    return ", ".join(f"[{one}](https://github.com/huggingface/transformers/issues/{one})" for one in numbers)


def whole(cells: pd.DataFrame) -> list[str]:
    """List the releases of which every architecture was tried."""
    partly = cells.loc[cells["outcome"] == NOT_MEASURED, "release"].unique()
    return [release for release in cells["release"].unique() if release not in partly]


def counts(cells: pd.DataFrame) -> pd.DataFrame:
    """Count the caches of each release that was measured whole by what they are."""
    names = {table.BUG: "wrong", table.EXACT: "sound", table.ROUNDING: "sound", FAILS: "fail"}
    told = outcomes(cells).map(names).fillna(OTHER).groupby("release").value_counts().unstack()
    found = told.reindex(whole(cells), columns=["wrong", "sound", "fail", OTHER]).fillna(0).astype(int)
    found.insert(0, "architectures", found.sum(axis=1))
    found["row_invariant()"] = ["tried, see the atlas" if one in TRIED else "refuses by name" for one in found.index]
    return found.reset_index()


def stories(cells: pd.DataFrame) -> pd.DataFrame:
    """Tell of each architecture in a sentence from which release to which it was wrong, and on which paths."""
    found = pd.concat([pd.DataFrame(dated()), wrong(cells)]).explode("threads").dropna(subset="threads")
    threads, told = found.groupby(_CELL)["threads"].agg(set).to_dict(), []
    for (name, begun, to, without), of in spans(cells).groupby(["architecture", "from", "to", "without"], sort=False):
        said = f"in {begun}" if begun == to else f"from {begun} to {to}"
        later = "not fixed yet" if to == cells["release"].iloc[-1] else "not measured later"
        numbers = sorted(set().union(*(threads.get((name, path), ()) for path in of["path"])))
        end = (f"sound in {without}" if without else later) + (f" ({_threads(numbers)})" if numbers else "")
        told.append({"architecture": name, "story": f"wrong {said} on {', '.join(of['path'])}; {end}"})
    return pd.DataFrame(told).groupby("architecture", sort=False).agg(". ".join).reset_index()


def lifetimes(cells: pd.DataFrame) -> str:
    """Say in a sentence how long faults lived, in measured releases."""
    ended = sorted(spans(cells).query("without != ''")["releases"])
    if not ended:
        return "No fault is seen to end yet."
    return (
        f"{len(ended)} faults were seen to end, counting each architecture and path once. "
        f"They lived through {ended[len(ended) // 2]} measured releases in the median, and {ended[-1]} at most."
    )


def markdown() -> str:
    """Write the page's tables."""
    found, told = cells(read()), [["architecture", "path", "outcome", "with and without", "threads"]]
    for one in dated():
        outcome = "; ".join(filter(None, [recall(one, found), one.get("why")]))
        releases = f"{one['has'] or 'none'} and {one['without'] or 'none yet'}"
        told.append([one["architecture"], one["path"], outcome, releases, _threads(one["threads"])])
    recalled = csv_table("tab-history-recall", "Faults that public threads describe.", told, filtered=True)
    return "\n\n".join([*_measured(found), "## Dated faults: found or missed", recalled, *_lines()])


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


def _by_kind(faults: pd.DataFrame) -> str:
    """Say in a sentence how many wrong cells are not the fault of a cache."""
    count = Counter([*faults["kind"], *faults["by"]])
    return (
        f"In {count['uncached']} of them the pass without a cache is the wrong one, and in {count['no promise']} a "
        "class takes a cache that it does not promise.\n\n"
        f"Causes are attributed by class and path. Those of {count['run']} cells were tested, each on one release: the "
        f"one thing was changed, and the fault went. For {count['report']} a report of ours tests one of the "
        f"classes. For {count['source']} the release's source was read, and for {count['thread']} a public thread says "
        "so; these were not tested."
    )


def _grids(cells: pd.DataFrame) -> tuple[pd.DataFrame, list[list[str]]]:
    """Mark the architectures that were ever wrong by release, and count the marks of the others."""
    # The newest first, for a phone shows few columns; one cell a release for those that were never wrong is too much
    # for a page.
    newest = whole(cells)[::-1]
    marks = outcomes(cells).map(MARKS).unstack().reindex(columns=newest).dropna(how="all")
    faults = pd.DataFrame({"release": newest}).merge(wrong(cells))
    at_fault = faults.groupby("architecture")["path"].agg(lambda of: " · ".join(of.unique()))
    grid = marks.loc[at_fault.index].fillna("")
    grid.insert(0, "wrong on", at_fault)
    sound = [["architecture", "first and last release", "marks"]]
    for name, row in marks.drop(at_fault.index).iterrows():
        seen = row.dropna()
        counted = ", ".join(f"{times} {mark}" for mark, times in Counter(seen).items())
        sound.append([name, f"{seen.index[-1]} to {seen.index[0]}", counted])
    return grid.reset_index(), sound


def _measured(cells: pd.DataFrame) -> list[str]:
    faults, faulty = wrong(cells), counts(cells).set_index("release")["wrong"]
    (grid, sound), (told, left), worst = _grids(cells), explained(faults), faulty.idxmax()
    open_ones = f"Without a cause: {'; '.join(left)}." if left else "Each has a cause in the table."
    return [
        "## Architectures and releases",
        f"{len(faulty)} releases are measured whole. In {faulty.index[-1]}, the newest, {faulty.iloc[-1]} "
        f"architectures are wrong on some path; most were in {worst}, {faulty[worst]}, and every release has "
        f"{faulty.min()} or more. The table begins with the newest. "
        "Search for a name to see a family, or a path to see who was wrong on it.",
        "Marks: = exact, ≈ rounding, ✗ wrong on some path, ? undecided, – does not run, ○ no cache or a "
        "full pass that is not causal; empty: not there yet.",
        csv_table("tab-history", "Architectures that were ever wrong, by release.", grid, filtered=True),
        csv_table("tab-history-sound", "Architectures that were never wrong, by releases.", sound, filtered=True),
        "## Counts by release",
        csv_table("tab-history-counts", "Architectures of each release by what their cache is.", counts(cells)),
        "## How long a fault lived",
        lifetimes(cells),
        csv_table("tab-history-faults", "Faults by architecture.", stories(cells), filtered=True),
        "## Why they were wrong",
        f"{len(faults)} combinations of architecture, release and path are wrong. "
        f"{open_ones} {_by_kind(faults)}",
        f"{(cells['outcome'] == MISFED).sum()} further ones are not counted: the class wants other positions than the "
        "atlas gave, and its cache is right.",
        csv_table("tab-history-causes", "Wrong cells by cause.", told),
    ]
