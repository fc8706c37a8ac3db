"""Numbers and statements of a chapter, evaluated from the rows of its runs.

What the published runs give is kept in ``_build/statements/<chapter>.json`` until the rows or the chapter's code change.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbook import fingerprint, paths
from kvbook.errors import UserError
from kvbook.runs import evidence, records
from kvreport.publishing import statements, wording

Evaluated = dict[str, Any]
# A number that every chapter has: on what its printed runs were made.
PROCESSOR = "processor"


def published(chapter: str) -> Evaluated | None:
    """Evaluate a chapter on what it publishes, once for each processor; None where it has no statements.

    Numbers are of the runs that are printed.  Of each statement there is ``outcome``, ``told``, ``units``, ``scope``, ``rule``,
    ``processors``, the outcome on each, and ``processor``, the first that has rows for it, whose outcome is printed; ``rows``
    has the digests of the published rows.
    """
    module = statements.module_of(chapter)
    if module is None:
        return None
    folders = [paths.RECORDED_RUNS / name for name in evidence.manifest().get(chapter, {}).get(evidence.PUBLISHED, ())]
    made_of = fingerprint.of_values(
        [
            fingerprint.of_source([module.__name__, __name__]),
            *(fingerprint.of_file(folder / "run.json") for folder in folders),
        ]
    )
    file = paths.BUILD / "statements" / f"{chapter}.json"
    if file.is_file():
        kept = json.loads(file.read_text("utf-8"))
        if kept.get("made_of") == made_of:
            return kept
    found = _published(chapter, module, folders) | {"made_of": made_of}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".partial")
    part.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    part.replace(file)
    return found


def _published(chapter: str, module: ModuleType, folders: list[Path]) -> Evaluated:
    by_processor = evidence.published(chapter, module.EXPERIMENTS)
    results = {processor: module.Results.of_runs(runs) for processor, runs in by_processor.items()}
    shown = evidence.printed(by_processor)
    numbers = module.Results.of_runs(shown)
    return {
        "numbers": {key: _number(chapter, key, give, numbers) for key, give in module.NUMBERS.items()}
        | {PROCESSOR: _processors(shown)},
        "statements": {name: _checked(statement, results) for name, statement in module.STATEMENTS.items()},
        "models": sorted(_models(shown)),
        "rows": [json.loads((folder / "run.json").read_text("utf-8"))["rows_sha256"] for folder in folders],
    }


def _checked(statement: statements.Statement[Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Check a statement on each processor."""
    found = {processor: statements.check(statement, of) for processor, of in results.items()}
    printed = next((name for name, one in found.items() if one.outcome != "not run"), next(iter(found)))
    return asdict(found[printed]) | {
        "scope": statement.scope,
        "rule": statements.bound_text(statement),
        "quantity": statement.must.quantity.about,
        "processor": printed,
        "processors": {processor: one.outcome for processor, one in found.items()},
    }


def _number(chapter: str, key: str, give: Callable[[Any], str], results: Any) -> str:
    if not isinstance(text := give(results), str):
        raise UserError(f"chapter {chapter}: number {key!r} is {text!r}: give it as text, rounded as it is to be read")
    return text


def _processors(runs: Mapping[str, records.Run]) -> str:
    names = dict.fromkeys(run.about["machine"]["processor"] for run in runs.values())
    return wording.listed([wording.processor(name) for name in names])


def _models(runs: Mapping[str, records.Run]) -> set[str]:
    # An experiment on shapes alone names no model.
    return {model["name"] for run in runs.values() for model in run.about.get("models", ())}


def own(chapter: str, folders: Mapping[str, str]) -> Evaluated | None:
    """Evaluate a chapter's statements on the runs of this machine that its executed copy names, by experiment and folder.

    Of each statement there is ``outcome``, ``told`` and ``comparison`` with the published one.  None where a run is gone.
    """
    module = statements.module_of(chapter)
    if module is None or not folders or not all((paths.RUNS / folder).is_dir() for folder in folders.values()):
        return None
    book = published(chapter)
    runs = {name: records.load(paths.RUNS / folder) for name, folder in folders.items()}
    # What of a run is to be compared; without a word of the module's, all of it as it is.
    counterpart = getattr(module, "comparable", dict)(runs)
    comparable = module.Results.of_runs(counterpart)
    found = {}
    for name, statement in module.STATEMENTS.items():
        here = statements.check(statement, comparable)
        there = statements.Checked(**{key: book["statements"][name][key] for key in ("outcome", "told", "units")})
        fits = _is_in_scope(statement.scope, counterpart, book["models"], book["statements"][name]["processor"])
        found[name] = asdict(here) | {"comparison": statements.compare(there, here, fits)}
    return {"statements": found}


def _is_in_scope(scope: statements.Scope, runs: Mapping[str, records.Run], models: list[str], processor: str) -> bool:
    if scope == "any model":
        return True
    if _models(runs) != set(models):
        return False
    return scope == "this model" or {run.about["machine"]["processor"] for run in runs.values()} == {processor}
