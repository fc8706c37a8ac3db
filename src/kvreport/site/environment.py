"""The runs that built the pages of this copy of the book: one table, read from the executed chapters."""

import csv
import io

from kvreport.publishing import published
from kvreport.site.context import Context
from kvreport.site.overlay import table_directive


def markdown(context: Context) -> str:
    """Write the table of runs, and below it the versions that they share or that set them apart."""
    runs = {chapter.stem: published.run_of(chapter.executed) for chapter in context.chapters}
    if not runs:
        return "No chapter has been executed yet."
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["chapter", "parameter set", "device", "started (UTC)", "took", "commit", "run"])
    for stem, run in runs.items():
        started = run["started"].replace("+00:00", "").replace("T", " ")
        row = [f"`{stem}`", run["profile"], run["machine"]["device_name"], started, f"{run['duration_s']:g} s"]
        writer.writerow([*row, f"`{run['commit']}`", f"`{run['inputs_sha256'][:16]}`"])
    caption = "The runs that built the pages of this copy; a commit with + after it had uncommitted changes."
    table = table_directive({"caption": caption, "name": "tab-runs", "csv": lines.getvalue()})
    return f"{table}\n\n{_versions(list(runs.values()))}"


def _versions(runs: list[dict]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run["versions"]))
    found = {name: sorted({run["versions"].get(name, "none") for run in runs}) for name in names}
    systems = sorted({f"{run['machine']['system']}, {run['machine']['processor']}" for run in runs})
    listed = "\n".join(f"- {name} {' and '.join(versions)}" for name, versions in found.items())
    return f"Versions of what computes and draws, over all chapters ({'; '.join(systems)}):\n\n{listed}"
