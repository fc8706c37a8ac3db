"""Which runs are behind a figure, a table or a statement: kept beside it, and named where it is cited."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvbook.runs.records import SHORT_HASH, Run
from kvreport.publishing import processors, wording


def of_run(run: Run) -> dict[str, Any]:
    """Keep of a run its hashes, the machine that made it, and whether it is a recorded one."""
    hashes = run.about["hash"]
    return {
        # Runs of several seeds are joined, and each has a hash.
        "runs": hashes if isinstance(hashes, list) else [hashes],
        "machine": run.about.get("machine"),
        "recorded": "recorded" in run.about,
    }


def is_recorded(made_by: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether all runs ship with the book: what only this machine ran nobody else can look up."""
    return all(made["recorded"] for made in made_by)


def measured(made_by: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say of each experiment its models, dtypes and number of independent units; those of equal words once."""
    said = []
    for made in made_by:
        dtypes = " ".join(wording.DTYPES.get(dtype, dtype) for dtype in made.get("dtypes", ()))
        units = " ".join(map(str, made.get("units", ())))
        facts = [wording.weights_said(", ".join(made["models"])), dtypes, f"n = {units}" if units else ""]
        said.append(f"{made.get('experiment', 'measured')}: {', '.join(filter(None, facts))}" if any(facts) else "")
    return list(dict.fromkeys(filter(None, said)))


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
