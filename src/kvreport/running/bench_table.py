"""The table of ratios that a bench gave, for the command line and the page on measuring."""

from collections.abc import Mapping

import pandas as pd

from kvbook import paths
from kvbook.runs import records
from kvreport.publishing import processors

EXPERIMENT = "bench"


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Write a bench for people; above 1 the first is the faster one, and a share is at most 1."""
    return pd.DataFrame(
        {
            "what": rows["what"],
            "against": rows["against"],
            "ratio": [
                f"{row.ratio:.2f} [{row.lowest:.2f}{_between(row.against)}{row.highest:.2f}]"
                for row in rows.itertuples()
            ],
            "runs": rows["repeats"],
            "ms": [f"{1000 * seconds:.4g}" for seconds in rows["seconds"]],
            "ms, against": [f"{1000 * seconds:.4g}" for seconds in rows["against_seconds"]],
        }
    )


def _between(against: str) -> str:
    """Write between two bounds what tells an interval from the lowest and highest; only chapter 10's ratio has an interval."""
    return ", " if against == "generate" else " to "


def latest() -> dict[str, records.Run]:
    """Find the bench that was finished last on each processor, among the recorded ones and those of this machine."""
    folders = [paths.RECORDED_RUNS / EXPERIMENT, paths.RUNS / EXPERIMENT]
    finished = [file.parent for folder in folders for file in folder.glob("*/run.json")]
    runs = [records.load(folder) for folder in finished if not folder.name.endswith(".partial")]
    runs.sort(key=lambda run: run.about["finished"])
    by_processor = {run.about["machine"]["processor"]: run for run in runs}
    return dict(sorted(by_processor.items()))


def heading(run: records.Run) -> str:
    """Name the processor of a bench in words that a narrow column can break."""
    return processors.label([run.about["machine"]]).replace("ONEDNN_MAX_CPU_ISA=", "held to ")


def beside(runs: Mapping[str, records.Run]) -> pd.DataFrame:
    """Set the ratios of several processors side by side: in the order of the last bench, then what only others measured."""
    columns = {
        processor: table(run.rows).set_index(["what", "against"])["ratio"].rename(processor)
        for processor, run in runs.items()
    }
    newest = max(runs.values(), key=lambda run: run.about["finished"])
    found = pd.concat(columns.values(), axis=1)
    first = columns[newest.about["machine"]["processor"]].index
    found = found.reindex(first.append(found.index.difference(first, sort=False)))
    return found.fillna("").reset_index()
