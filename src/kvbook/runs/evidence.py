"""Published evidence: the recorded runs that the book cites, found through a manifest and never by a hash.

``data/evidence.yaml`` names for each chapter and role the folders in ``data/runs``::

    static_cache:
      published:
        - static_speed/amd-epyc-2-threads__smollm2__1b5c2d0a
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from kvbook import UserError, fingerprint, paths, refusing
from kvbook.runs import records
from kvbook.settings import read_yaml

if TYPE_CHECKING:
    import pandas as pd

Manifest = dict[str, dict[str, list[str]]]
_FORM = TypeAdapter(Manifest)
# The role of the runs that a chapter's numbers, figures and statements speak of.
PUBLISHED = "published"
# Roles of runs of the same experiments on other populations of texts, as pages name these.
OTHER_TEXTS = ("English prose", "chat")
# Roles of runs on a kind of processor that has its name from another kind, or whose libraries were held back by the
# environment: they are never joined with those of that name.
HELD_BACK = "fewer instructions"
OTHER_KINDS = ("Zen 3", "Zen 4", HELD_BACK)
BESIDE = (*OTHER_TEXTS, *OTHER_KINDS)
# Settings that say how many units a run has: of several runs joined, their sum.
COUNTED = ("n_samples", "n_prompts", "n_usage")
# Lists of what each row says for itself: runs may differ in them, and are joined to one of all that they list.
LISTED = ("text_lengths", "dtypes")
# What is equal on the machines of runs that are joined.
_OF_MACHINE = ("processor", "cpu_capability", "threads", "device", "torch", "transformers")
HEADER = "# Published evidence: which recorded runs the book cites, by chapter and role.\n"


def manifest() -> Manifest:
    """Read the manifest: chapter, role, folders; without one, nothing is cited."""
    return copy.deepcopy(_manifest_in(paths.EVIDENCE)) if paths.EVIDENCE.is_file() else {}


@fingerprint.once_a_content
def _manifest_in(file: Path) -> Manifest:
    """Read the manifest once for each content: a build asks for it hundreds of times."""
    with refusing(f"{file} must hold <chapter>: {{<role>: [<experiment>/<folder>, ...]}}", ValidationError):
        content = _FORM.validate_python(read_yaml(file) or {})
    for chapter, roles in content.items():
        for cited_folders in roles.values():
            if twice := [folder for folder, times in Counter(cited_folders).items() if times > 1]:
                raise UserError(f"{file}: chapter {chapter} cites {twice[0]}, and would count it, twice: delete one")
    return content


def folders(chapter: str, *roles: str) -> list[Path]:
    """List the folders of the runs that a chapter cites in these roles; of all of them where none is named."""
    by_role = manifest().get(chapter, {})
    return [paths.RECORDED_RUNS / folder for role in roles or by_role for folder in by_role.get(role, ())]


def cited(chapter: str, role: str, revisions: Mapping[str, int]) -> dict[str, list[records.Run]]:
    """Read the runs that a chapter cites in a role; its experiments' revisions are given by their names."""
    named = manifest().get(chapter, {}).get(role)
    if not named:
        raise UserError(f"{paths.EVIDENCE} names no runs for chapter {chapter} as {role!r}: record one, add it there")
    found: dict[str, list[records.Run]] = {}
    for folder in named:
        name = folder.partition("/")[0]
        if name not in revisions:
            raise UserError(f"{paths.EVIDENCE}: {folder}: chapter {chapter} has no experiment {name!r} as {role!r}")
        found.setdefault(name, []).append(_read(folder, revisions[name]))
    return found


def _read(folder: str, current: int) -> records.Run:
    if not (paths.RECORDED_RUNS / folder).is_dir():
        raise UserError(f"{paths.EVIDENCE}: there is no {paths.RECORDED_RUNS / folder}: restore it from git")
    run = records.load(paths.RECORDED_RUNS / folder)
    # Runs from before there were revisions are of the first one.
    if (revision := run.about.get("revision", 1)) != current:
        old = f"{folder} is of revision {revision}, and {folder.partition('/')[0]} is at {current}"
        raise UserError(f"{paths.EVIDENCE}: {old}: record a run of today's and cite that")
    return run


def published(chapter: str, revisions: Mapping[str, int]) -> dict[str, dict[str, records.Run]]:
    """Read what a chapter publishes, by processor and experiment; the runs of several seeds are joined.

    The processor that the manifest names first comes first.  What was made there on other texts, or on another kind of
    that name, stands by itself, under the processor's name and theirs, after all of the first ones.
    """
    found: dict[str, dict[str, list[records.Run]]] = {}
    for role in (PUBLISHED, *(role for role in BESIDE if role in manifest().get(chapter, {}))):
        beside = "" if role == PUBLISHED else f", {role}"
        for name, runs in cited(chapter, role, revisions).items():
            for run in runs:
                found.setdefault(run.about["machine"]["processor"] + beside, {}).setdefault(name, []).append(run)
    return {processor: {name: joined(runs) for name, runs in by_name.items()} for processor, by_name in found.items()}


def texts_of(processor: str) -> str:
    """Read from a name that `published` uses on which other texts its runs were made; empty for the first ones."""
    return beside if (beside := beside_of(processor)) in OTHER_TEXTS else ""


def beside_of(processor: str) -> str:
    """Read from a name that `published` uses what stands behind the processor's own name."""
    return next((beside for beside in BESIDE if processor.endswith(f", {beside}")), "")


def printed(by_processor: "Mapping[str, Mapping[str, records.Run]]", chapter: str = "") -> dict[str, records.Run]:
    """Choose the runs whose numbers are printed: each experiment's that the chapter cites first, or the first ones."""
    first, found = {folder.parent.name: folder for folder in reversed(folders(chapter, PUBLISHED))}, {}
    for runs in by_processor.values():
        found |= {name: run for name, run in runs.items() if name not in found or run.folder == first.get(name)}
    return found


@dataclass(frozen=True)
class _Joined(records.Run):
    """Runs that differ in their seed alone; what a page does not print need not be read for it."""

    parts: tuple[records.Run, ...] = ()

    @cached_property
    def rows(self) -> "pd.DataFrame":
        """Put the rows one after the other, samples numbered on."""
        import pandas as pd

        pieces, begin = [], 0
        for run in self.parts:
            rows = run.rows
            if "sample" in rows:
                rows, begin = _numbered_on(rows, begin)
            pieces.append(rows.assign(seed=run.about["settings"]["seed"]))
        return pd.concat(pieces, ignore_index=True)


def joined(runs: Sequence[records.Run]) -> records.Run:
    """Join runs that differ in their seed alone: their rows one after the other, samples numbered on."""
    if len(runs) == 1:
        return runs[0]
    first, *others = (_but_for_the_seed(run.about) for run in runs)
    processors = _recorded_processors(runs)
    if any(other != first for other in others) or any(other != processors[0] for other in processors):
        names = ", ".join(run.folder.name for run in runs)
        raise UserError(f"{paths.EVIDENCE}: {names} differ in more than their seed: cite them in roles of their own")
    about = runs[0].about
    counts = {key: value * len(runs) for key, value in about["settings"].items() if key in COUNTED}
    for key in about["settings"].keys() & set(LISTED):
        counts[key] = list(dict.fromkeys(each for run in runs for each in run.about["settings"][key]))
    machine = dict(about["machine"])
    if len(processors) < len(runs):
        # Some runs do not say which it was.
        machine.pop("cpu", None)
    seeds = [run.about["settings"]["seed"] for run in runs]
    settings = about["settings"] | counts
    changed = {"machine": machine, "settings": settings, "hash": [run.hash for run in runs], "seeds": seeds}
    return _Joined(about | changed, runs[0].folder, parts=tuple(runs))


def _numbered_on(rows: "pd.DataFrame", begin: int) -> "tuple[pd.DataFrame, int]":
    """Number samples from a place on; named ones, a document's own texts, do not depend on the seed: keep them once."""
    import pandas as pd

    numbers = pd.to_numeric(rows["sample"], errors="coerce")
    if numbers.notna().all():
        return rows.assign(sample=numbers + begin), int(numbers.max()) + begin + 1
    if begin:
        rows, numbers = rows[numbers.notna()], numbers[numbers.notna()]
    named = (numbers + begin).map("{:.0f}".format).where(numbers.notna(), rows["sample"])
    return rows.assign(sample=named), int(numbers.max()) + begin + 1


def _but_for_the_seed(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal in runs whose rows are put together."""
    settings = {key: value for key, value in about["settings"].items() if key not in ("seed", *LISTED)}
    models = [{key: value for key, value in model.items() if key != "seed"} for model in about.get("models", ())]
    machine = {key: about["machine"].get(key) for key in _OF_MACHINE}
    return {"settings": settings, "models": models, "corpus": about.get("corpus"), "machine": machine}


def _recorded_processors(runs: Sequence[records.Run]) -> list[dict[str, Any]]:
    """List which processors runs had, those that recorded it; another stepping has the same kernels."""
    recorded = [run.about["machine"]["cpu"] for run in runs if "cpu" in run.about["machine"]]
    return [{key: value for key, value in cpu.items() if key != "stepping"} for cpu in recorded]


def cite(chapter: str, role: str, folder: Path) -> None:
    """Add a recorded run to what a chapter cites."""
    content = manifest()
    named = content.setdefault(chapter, {}).setdefault(role, [])
    if (name := folder.relative_to(paths.RECORDED_RUNS).as_posix()) not in named:
        named.append(name)
    paths.keep(paths.EVIDENCE, (HEADER + yaml.safe_dump(content, sort_keys=False, width=1000)).encode())
