"""The runs that built the pages of this copy of the book: one table, read from the executed chapters."""

import json
from collections.abc import Iterable

from kvbook.runs import evidence
from kvreport.publishing import processors
from kvreport.running.planning import Chapter, run_of
from kvreport.site.overlay import csv_table


def markdown(chapters: Iterable[Chapter]) -> str:
    """Write the table of runs, and below it the versions that they share or that set them apart."""
    runs = {chapter.stem: run_of(chapter.executed) for chapter in chapters}
    if not runs:
        return "No chapter has been executed yet."
    rows = [["chapter", "parameter set", "device", "started (UTC)", "took", "commit", "run"]]
    for stem, run in runs.items():
        started = run["started"].replace("+00:00", "").replace("T", " ")
        row = [f"`{stem}`", run["profile"], processors.device(run["machine"]), started, f"{run['duration_s']:g} s"]
        rows.append([*row, f"`{run['commit']}`", f"`{run['inputs_sha256'][:16]}`"])
    caption = "The runs that built the pages of this copy; a commit with + after it had uncommitted changes."
    return f"{csv_table('tab-runs', caption, rows)}\n\n{_versions(list(runs.values()))}"


def recorded_processors() -> str:
    """Write the table of processors whose runs the book cites: what the runs recorded, and what is from notes."""
    machines: dict[str, list[dict]] = {}
    for folder in dict.fromkeys(folder for chapter in evidence.manifest() for folder in evidence.folders(chapter)):
        if machine := json.loads((folder / "run.json").read_text("utf-8")).get("machine"):
            machines.setdefault(machine["processor"], []).append(machine)
    if not machines:
        return "No run is cited."
    rows = [["the system's name", "recorded by the runs", "of runs", "from notes, for the others"]]
    for name, of in machines.items():
        told, others = ([one for one in of if processors.is_recorded(one) is known] for known in (True, False))
        said = [processors.label(some) if some else "" for some in (told, others)]
        rows.append([name, said[0], f"{len(told)} of {len(of)}", said[1]])
    caption = "Processors of the published runs. Family, model and instruction sets are recorded since version 0.2.0."
    return csv_table("tab-processors", caption, rows)


def _versions(runs: list[dict]) -> str:
    names = dict.fromkeys(name for run in runs for name in run["versions"])
    systems = sorted({f"{run['machine']['system']}, {run['machine']['processor']}" for run in runs})
    found = [f"- {name} {' and '.join(sorted({run['versions'].get(name, 'none') for run in runs}))}" for name in names]
    lines = "\n".join(found)
    return f"Versions of what computes and draws, over all chapters ({'; '.join(systems)}):\n\n{lines}"
