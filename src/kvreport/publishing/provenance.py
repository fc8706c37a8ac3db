"""Which runs are behind a figure, a table or a statement: kept beside it, and named where it is cited."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvbook.runs.records import SHORT_HASH, Run
from kvreport.publishing import processors


def of_run(run: Run) -> dict[str, Any]:
    """Keep of a run its hashes, the machine that made it, and whether it is a recorded one."""
    hashes = run.about["hash"]
    return {
        # Runs of several seeds are joined, and each has a hash.
        "runs": hashes if isinstance(hashes, list) else [hashes],
        "machine": run.about.get("machine"),
        "recorded": "recorded" in run.about,
    }


def named(made_by: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name runs by their short hashes, those of one machine and its versions together."""
    together: dict[tuple[str, str], list[str]] = {}
    for made in made_by:
        kind = "recorded run" if made["recorded"] else "run"
        hashes = [run[:SHORT_HASH] for run in made["runs"]]
        together.setdefault((kind, _place(made["machine"])), []).extend(hashes)
    return [f"{kind}{'s' * (len(runs) > 1)} {', '.join(runs)}{place}" for (kind, place), runs in together.items()]


def _place(machine: Mapping[str, Any] | None) -> str:
    if machine is None:
        return ""
    return f" on {processors.device(machine)}, torch {machine['torch']}, transformers {machine['transformers']}"
