"""Numbers and statements of a chapter, evaluated from the rows of its runs.

What the published runs give is kept in ``_build/statements/<chapter>.json``, what this machine's give in
``<chapter>.yours.json``, until the rows or the chapter's code change.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbook import UserError, fingerprint, paths
from kvbook.models.corpus import POPULATIONS
from kvbook.runs import evidence, records
from kvreport.publishing import chapter_name, measures, processors, statements, wording
from kvreport.publishing import found as found_in
from kvreport.publishing.found import Found
from kvreport.publishing.judging import NOT_RECORDED

Evaluated = dict[str, Any]
# A number that every chapter has: on what its printed runs were made.
PROCESSOR = "processor"
# Of a chapter that says nothing of rows.
_NOTHING = {
    "numbers": {}, "behind": {PROCESSOR: []}, "labels": {}, "statements": {}, "verdicts": None, "rows": [],
    "made_of": "",
}


def published(chapter: str) -> Evaluated:
    """Evaluate a chapter on what it publishes, once for each processor; all of it is empty where it has no statements.

    Numbers are of the runs that are printed; ``key@Maker`` is the number on the first processor of that maker.
    ``behind`` says of each which models, processors and texts its runs had, and ``labels`` what pages call the
    processors. Of each statement there is ``outcome``, ``told``, ``units``, ``scope``, ``rule``, ``processors``, the
    outcome on each, ``said``, the estimates on each, ``made_by``, the runs that its check reads on each, ``on``, the
    maker that it speaks of, and ``processor``, the first that has rows for it, whose outcome is printed. ``verdicts``
    has the document, the name and the rows of the table of its claims, None where there is none, and ``rows`` the
    digests of the published rows.
    """
    if not found_in.has_measures(chapter):
        return _NOTHING
    return _kept(chapter, _made_of(chapter), lambda: _published(chapter))


def _folders(chapter: str) -> list[Path]:
    return evidence.folders(chapter, evidence.PUBLISHED, *evidence.BESIDE)


def _made_of(chapter: str) -> list[str]:
    runs = (fingerprint.of_large_file(folder / "run.json") for folder in _folders(chapter))
    # Rows are imported by a computed name.
    code = fingerprint.of_source([*(f"kvreport.chapters.{chapter}.{of}" for of in ("measures", "rows")), __name__])
    known = [*sorted(paths.DOCUMENTS.glob("*.yaml")), *([paths.PROCESSORS] if paths.PROCESSORS.is_file() else [])]
    return [code, *map(fingerprint.of_file, known), *runs, *sorted(roles(chapter))]


def roles(chapter: str) -> set[str]:
    """List the numbers that the chapter's prose and other pages ask for by a measure's name."""
    files = [(path, None) for path in paths.CHAPTERS.glob("*.ipynb") if chapter_name(path.stem) == chapter]
    files += [(path, chapter) for path in (paths.ROOT / "index.md", *(paths.ROOT / "pages").rglob("*.md"))]
    asked = [(_asked_in(path), named) for path, named in files if path.is_file()]
    return {what for roles, named in asked for of, what in roles if of == named} - {PROCESSOR}


@fingerprint.once_a_content
def _asked_in(path: Path) -> set[tuple[str | None, str]]:
    """Find the numbers that a file asks for, and of which chapter: a build asks for them a hundred times."""
    # In a notebook's file quotation marks are escaped.
    text = path.read_text("utf-8").replace('\\"', '"')
    return {(role["chapter"], role["what"]) for role in measures.ROLE.finditer(text)}


def _kept(name: str, made_of: list[Any], evaluate: Callable[[], Evaluated]) -> Evaluated:
    """Read what was evaluated before from the same things: a build with nothing to do need not import what computes."""
    file, digest = paths.BUILD / "statements" / f"{name}.json", fingerprint.of_values(made_of)
    if file.is_file():
        kept = json.loads(file.read_text("utf-8"))
        if kept.get("made_of") == digest:
            return kept
    found = evaluate() | {"made_of": digest}
    paths.keep(file, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    return found


def _published(chapter: str) -> Evaluated:
    module = found_in.measures_of(chapter)
    results = found_in.published(chapter)
    shown = evidence.printed({name: found.runs for name, found in results.items()}, chapter)
    # Where one processor has everything, its tables are not computed a second time.
    printed = next((found for found in results.values() if found.runs == shown), None)
    printed = printed or found_in.of_runs(chapter, shown)
    labels, made_on = {}, {}
    for name, found in results.items():
        label = processors.label(run.about["machine"] for run in found.runs.values())
        labels[name] = ", on ".join(filter(None, [label, evidence.texts_of(name)]))
        # By the group that a run was taken from: another kind of processor may have the same name.
        made_on |= {run.folder: labels[name] for run in found.runs.values()}

    def origins_of(runs: Iterable[records.Run]) -> list[dict[str, Any]]:
        return [{"models": _names(run), "processor": made_on[run.folder], "texts": _texts(run)} for run in runs]

    origins = origins_of(filter(None, printed.runs.values()))
    # A kind that shares its name with another one is named where its numbers stand.
    others = {label for name, label in labels.items() if evidence.beside_of(name) in evidence.OTHER_KINDS}
    named = dict.fromkeys(one["processor"] for one in origins)
    first = wording.listed([label for label in named if label not in others])
    known, asked = measures.named(module), sorted(roles(chapter))

    def numbers_of(found: Found, processor: str, everywhere: Sequence[Found] = ()) -> dict[str, str]:
        return {role: measures.written(role, known, found, everywhere) for role in asked} | {PROCESSOR: processor}

    numbers = numbers_of(printed, first, list(results.values()))
    for name, of in results.items():
        for key, text in numbers_of(of, labels[name]).items():
            # Two processors may have read other texts.
            if text != NOT_RECORDED:
                numbers.setdefault(f"{key}@{maker(name)}", text)
    behind = {role: origins_of(measures.behind(known[role.split()[0]], printed)) for role in asked}
    said = {key.partition("@")[0] for key, text in numbers.items() if text != NOT_RECORDED}
    for role in set(asked) - said:
        one = known[role.split()[0]]
        if isinstance(one, measures.Measure) and printed[one.rows] is not None:
            raise UserError(f"{{measured}}`{role}`: no row has these values: is one misspelt?")
    return {
        "numbers": numbers, "behind": behind | {PROCESSOR: origins}, "labels": labels,
        "statements": {name: _checked(statement, results) for name, statement in module.STATEMENTS.items()},
        "verdicts": _verdicts(module, results, labels), "models": sorted(_models(shown)),
        "rows": [json.loads((folder / "run.json").read_text("utf-8"))["rows_sha256"] for folder in _folders(chapter)],
    }


def _checked(statement: statements.Statement, results: Mapping[str, Found]) -> dict[str, Any]:
    """Check a statement on each processor."""
    found = {processor: statements.check(statement, of) for processor, of in results.items()}
    measure = statement.must.quantity
    made_by = {
        processor: [processors.of_run(run) for run in measures.behind(measure, of)] if statement.is_for(of) else []
        for processor, of in results.items()
    }
    printed = next((name for name, one in found.items() if one.outcome != "not run"), next(iter(found)))
    return asdict(found[printed]) | {
        "scope": statement.scope, "on": statement.on, "rule": statement.must.said("it", set()),
        "n_rows": _rows_behind(statement, results[printed]), "processor": printed, "made_by": made_by,
        "processors": {processor: one.outcome for processor, one in found.items()},
        "said": {processor: one.told for processor, one in found.items()},
    }


def _rows_behind(statement: statements.Statement, found: Found) -> int:
    """Count the rows that a statement's check reads; of a frame, those alone that its measure counts."""
    return sum(len(counted) for counted, *_ in statement.must.quantity.groups(found).values())


def _verdicts(module: ModuleType, results: Mapping[str, Found], labels: Mapping[str, str] | None = None):
    claims = getattr(module, "CLAIMS", None)
    rows = claims and claims.shown(results, labels).to_dict("records")
    return claims and {"document": claims.document, "table": claims.table, "rows": rows}


def maker(processor: str) -> str:
    """Return what follows `@` in a number: what libraries were held to, a kind or texts, or else the maker."""
    if limit := processors.LIMIT.search(processor):
        return limit["to"]
    return evidence.beside_of(processor).replace(" ", "") or re.match(r"\w*", processor)[0]


def _texts(run: records.Run) -> str:
    """Name the population that a run's texts were drawn from; empty where it drew none."""
    if corpus := (run.about.get("corpus") or {}).get("corpus"):
        return POPULATIONS.get(corpus, "another corpus")
    return "questions" if "questions" in run.about else ""


def _names(run: records.Run) -> list[str]:
    # An experiment on shapes alone names no model.
    return [wording.model_said(model) for model in run.about.get("models", ())]


def _models(runs: Mapping[str, records.Run]) -> set[str]:
    return {name for run in runs.values() for name in _names(run)}


def own(chapter: str, folders: Mapping[str, str]) -> Evaluated | None:
    """Evaluate a chapter on the runs of this machine that its executed copy names, by experiment and folder.

    Of each statement there is ``outcome``, ``told`` and ``comparison`` with the published one; ``verdicts`` is as in
    `published`.  None where a run is gone.
    """
    there = all((paths.RUNS / folder).is_dir() for folder in folders.values())
    if not found_in.has_measures(chapter) or not folders or not there:
        return None
    book = published(chapter)
    made_of = [book["made_of"], *sorted(folders.items())]
    return _kept(f"{chapter}.yours", made_of, lambda: _own(chapter, book, folders))


def _own(chapter: str, book: Evaluated, folders: Mapping[str, str]) -> Evaluated:
    module = found_in.measures_of(chapter)
    runs = {name: records.load(paths.RUNS / folder) for name, folder in folders.items()}
    on_this_machine, found = found_in.of_runs(chapter, runs), {}
    label = processors.label(run.about["machine"] for run in runs.values())
    alike = [name for name, said in book["labels"].items() if said == label]
    for name, statement in module.STATEMENTS.items():
        here, there = statements.check(statement, on_this_machine), book["statements"][name]
        processor, outcome = _to_compare(there, alike)
        fits = _is_in_scope(statement.scope, runs, book["models"], processor, processor in alike)
        few = statement.says_some and _rows_behind(statement, on_this_machine) < there["n_rows"]
        own = "not resolved" if few and here.outcome == "fails" else here.outcome
        found[name] = asdict(here) | {"comparison": statements.compare(outcome, own, fits)}
    return {"statements": found, "verdicts": _verdicts(module, {"": on_this_machine})}


def _to_compare(published: Mapping[str, Any], alike: Sequence[str]) -> tuple[str, statements.Outcome]:
    """Choose whose published outcome a run is held against: its own kind of processor's, else the printed one."""
    outcomes = published["processors"]
    chosen = next((name for name in alike if outcomes[name] in ("holds", "fails")), published["processor"])
    return chosen, outcomes[chosen]


def _is_in_scope(
    scope: statements.Scope, runs: Mapping[str, records.Run], models: list[str], processor: str, alike: bool = False
) -> bool:
    if scope == "any model" or _models(runs) != set(models):
        return scope == "any model"
    machines = [run.about["machine"] for run in runs.values()]
    # What a GPU found says nothing of the processor beside it.
    on_it = all(machine.get("device", "cpu") == "cpu" for machine in machines)
    there = on_it and (alike or {machine["processor"] for machine in machines} == {processor})
    return scope == "this model" or there
