"""Published evidence: the recorded runs that the book cites, found through a manifest and never by a hash.

``data/evidence.yaml`` names for each chapter and role the folders in ``data/runs``::

    static_cache:
      the notebook's 200 tokens:
        - static_speed/amd-epyc-2-threads__smollm2__1b5c2d0a
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvbook import paths
from kvbook.errors import UserError
from kvbook.runs import records

if TYPE_CHECKING:
    from kvbook.runs.experiment import Experiment

Manifest = dict[str, dict[str, list[str]]]


def manifest() -> Manifest:
    """Read the manifest: chapter, role, folders; without one, nothing is cited."""
    file = paths.EVIDENCE
    if not file.is_file():
        return {}
    try:
        content = yaml.safe_load(file.read_text("utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not _is_manifest(content):
        raise UserError(f"{file} must hold <chapter>: {{<role>: [<experiment>/<folder>, ...]}}")
    return content


def _is_manifest(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(roles, dict) and all(isinstance(folder, str) for folders in roles.values() for folder in folders)
        for roles in content.values()
    )


def folders(chapter: str) -> list[Path]:
    """List the folders of all runs that a chapter cites."""
    return [paths.RECORDED_RUNS / folder for cited in manifest().get(chapter, {}).values() for folder in cited]


def cited(chapter: str, role: str, experiments: "Iterable[Experiment]") -> dict[str, list[records.Run]]:
    """Read the runs that a chapter cites in a role."""
    named = manifest().get(chapter, {}).get(role)
    if not named:
        raise UserError(
            f"{paths.EVIDENCE} names no runs for chapter {chapter} as {role!r}: record one and add it there"
        )
    known = {experiment.name: experiment for experiment in experiments}
    found: dict[str, list[records.Run]] = {}
    for folder in named:
        name = folder.partition("/")[0]
        if name not in known:
            raise UserError(f"{paths.EVIDENCE}: {folder}: chapter {chapter} has no experiment {name!r} as {role!r}")
        if not (paths.RECORDED_RUNS / folder).is_dir():
            raise UserError(f"{paths.EVIDENCE}: there is no {paths.RECORDED_RUNS / folder}: restore it from git")
        run = records.load(paths.RECORDED_RUNS / folder)
        # Runs from before there were revisions are of the first one.
        if (revision := run.about.get("revision", 1)) != known[name].revision:
            raise UserError(
                f"{paths.EVIDENCE}: {folder} is of revision {revision}, and {name} is at {known[name].revision}: "
                "record a run of today's and cite that"
            )
        found.setdefault(name, []).append(run)
    return found
