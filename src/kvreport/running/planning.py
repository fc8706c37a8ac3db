"""Which chapters there are, what each runs with, and which must run again.

A chapter is a notebook in ``chapters/`` with no outputs, and a folder of code in ``kvreport/chapters/`` of the
notebook's name without its number.  The folder's ``chapter.yaml`` holds its parameters, names the data that it reads,
and says whether some of its experiments must run alone; a set may also name settings of the chapter that its notebook
has no parameter for.  Experiments that decide little for the time that they take are left out of a default build::

    parameters: {default: {n_samples: 24}, smoke: {n_samples: 4}, gpu: {device: cuda}}
    data: [documents/issue-25420.yaml, models/standins/*/*]
    alone: true
    left_out: [layer_drift_lengths]

``default`` is what ``make book`` runs with; the other sets are laid over it, ``real`` by itself wherever the trained
model has been fetched: what is published speaks of that model.

An executed copy is fresh as long as the digest in it equals the digest of everything that could change its outputs: the
code cells (not the prose), the parameters, the modules of these packages that the notebook imports, directly or through
one another, the data that the chapter names, the recorded runs that it cites, and the versions of the libraries that
compute and draw.  Contents count, never dates, so a fresh clone or a restored cache is not taken for a change.  An
import by a computed name is not seen.
"""

import ast
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

import kvreport
from kvbook import UserError, fingerprint, paths, refusing
from kvbook.models import packages, registry
from kvbook.runs import evidence
from kvbook.settings import Settings, faults_of, read_yaml
from kvreport.publishing import STYLE, chapter_name, found

DEFAULT_PROFILE = "default"
# Few texts of the trained model.
REAL_PROFILE = "real"

# A new version of one of these may change what a chapter shows.
LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "scipy", "pandas", "matplotlib", "seaborn")


@dataclass(frozen=True)
class Folders:
    """Where a book's parts lie; the defaults are this repository's."""

    chapters: Path = paths.CHAPTERS
    parameters: Path = paths.PARAMETERS
    data: Path = paths.DATA
    executed: Path = paths.EXECUTED
    figures: Path = paths.FIGURES
    code: Path = Path(kvreport.__file__).parent / "chapters"


class Group(BaseModel, extra="forbid"):
    """Experiments that are published, with which seeds and parameters, and as what they are cited."""

    experiments: list[str]
    seeds: list[int] = [0]
    parameters: dict[str, Any] = {}
    role: str = evidence.PUBLISHED


class About(BaseModel, extra="forbid"):
    """A ``chapter.yaml``; `alone`: some experiments measure time, or use all cores; `left_out`: of a default build."""

    parameters: dict[str, dict[str, Any] | None] = {}
    data: list[str] = []
    packages: list[str] = []
    alone: bool = False
    left_out: list[str] = []
    evidence: list[Group] = []


@dataclass(frozen=True)
class Chapter:
    """A notebook and what it is to run with.

    Parameters
    ----------
    stem
        The notebook's file name without its suffix.
    profile
        The name of the parameter set that was asked for.
    parameters
        What replaces the defaults of the notebook's own parameters cell.
    place
        Which chapter of how many it is, to say while it runs.
    folders
        The book it belongs to.
    """

    stem: str
    profile: str
    parameters: dict[str, Any]
    place: tuple[int, int] = (1, 1)
    folders: Folders = field(default_factory=Folders)

    @property
    def name(self) -> str:
        """The name of its folder of code."""
        return chapter_name(self.stem)

    @property
    def source(self) -> Path:
        """The notebook in git."""
        return self.folders.chapters / f"{self.stem}.ipynb"

    @property
    def executed(self) -> Path:
        """The copy with outputs."""
        return self.folders.executed / f"{self.stem}.ipynb"

    @property
    def partial(self) -> Path:
        """The copy that is being made, or that a failure left."""
        return self.folders.executed / f"{self.stem}.partial.ipynb"

    @property
    def figures(self) -> Path:
        """The figures that belong to the executed copy."""
        return self.folders.figures / self.stem

    @property
    def about(self) -> About:
        """What its ``chapter.yaml`` says."""
        return _read_about(self.folders.code, self.name)

    @property
    def left_out(self) -> list[str]:
        """The experiments that it leaves out: in a default build those of its ``chapter.yaml``."""
        return self.about.left_out if self.profile == DEFAULT_PROFILE else []

    def defaults(self) -> dict[str, Any] | None:
        """Read the defaults in the notebook's own parameters cell; None without such a cell."""
        all_cells = read_notebook(self.source)["cells"]
        cells = [cell for cell in all_cells if "parameters" in cell.get("metadata", {}).get("tags", ())]
        lines = [line for cell in cells for line in ast.parse("".join(cell["source"])).body]
        named = {line.target.id: ast.literal_eval(line.value) for line in lines if isinstance(line, ast.AnnAssign)}
        return named if cells else None

    def values(self) -> dict[str, Any]:
        """Return all parameters: the notebook's defaults, and over them what the chapter is to run with."""
        return (self.defaults() or {}) | self.parameters

    @property
    def package(self) -> str:
        """The package that its folder of code is."""
        return f"kvreport.chapters.{self.name}"

    def setting_names(self) -> set[str]:
        """Name all that the chapter's settings hold, which is more than its notebook has parameters."""
        if not (self.folders.code / self.name / "__init__.py").is_file():
            return set()
        module = importlib.import_module(self.package)
        classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Settings)]
        return {name for found in classes if found.__module__ == module.__name__ for name in found.model_fields}

    def inputs_sha256(self) -> str:
        """Digest everything that could change what the chapter shows."""
        cells = code_cells(read_notebook(self.source))
        source = _source_sha256(code for _, code in cells)
        return fingerprint.of_values([cells, source, fingerprint.of_file(STYLE), self.measured_sha256()])

    def measured_sha256(self) -> str:
        """Digest what the chapter's rows depend on: its inputs without the notebook and the code that draws."""
        data = {str(file.relative_to(self.folders.data)): fingerprint.of_large_file(file) for file in self.data_files()}
        # A chapter that ran on a stand-in is not fresh once the packaged model is there.
        asked = self.about.packages
        used = asked and {name: state for name, state in packages.state().items() if name in asked}
        source = fingerprint.of_source(found.measuring(self.package))
        models = fingerprint.of_file(registry.FILE)
        given = [self.values(), self.parameters, self.left_out]
        return fingerprint.of_values([*given, source, models, used, data, versions()])

    def runs_kept(self) -> dict[str, str] | None:
        """Name the runs that the executed copy was made from, by experiment; None where measuring gives others."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = run_of(self.executed)["measured"]
            there = kept["runs"] and all((paths.RUNS / folder).is_dir() for folder in kept["runs"].values())
            return kept["runs"] if there and kept["sha256"] == self.measured_sha256() else None
        return None

    def data_files(self) -> list[Path]:
        """List the files under ``data/`` that the chapter depends on: what ``chapter.yaml`` names; without one, all."""
        named = {pattern: set(self.folders.data.glob(pattern)) for pattern in self.about.data}
        if missing := [pattern for pattern, found in named.items() if not found]:
            raise UserError(f"chapter {self.name} names data/{missing[0]}, which does not exist: correct chapter.yaml")
        files = set().union(*named.values(), (folder / "run.json" for folder in evidence.folders(self.name)))
        # Prose about the data changes nothing that a chapter computes; a dot file is somebody's half-written one.
        return sorted(file for file in files if file.is_file() and file.suffix != ".md" and file.name[0] != ".")

    def why_stale(self) -> str | None:
        """Say in a few words why the chapter must run; None when its copy is fresh."""
        if not self.executed.is_file():
            return "not executed yet"
        try:
            stored = run_of(self.executed)
            made_from, files = stored["inputs_sha256"], stored["files"]
        except (ValueError, KeyError, TypeError):
            return "its executed copy is damaged"
        if made_from != self.inputs_sha256():
            return "its inputs have changed"
        for name, sha256 in files.items():
            file = self.figures / name
            if not file.is_file() or fingerprint.of_file(file) != sha256:
                return f"its figure file {name} is missing or not the one it made"
        return None


def plan(profile: str | None = None, folders: Folders | None = None) -> list[Chapter]:
    """List the book's chapters with their parameters."""
    folders = folders or Folders()
    profile = profile or os.environ.get("PROFILE") or DEFAULT_PROFILE
    stems = [path.stem for path in sorted(folders.chapters.glob("*.ipynb"))]
    by_itself = profile == DEFAULT_PROFILE and all(packages.state().values())
    taken = DEFAULT_PROFILE, REAL_PROFILE if by_itself else profile
    sets = _parameter_sets(folders, stems, taken)
    if profile not in sets:
        known = f"there are {', '.join(sorted(sets))}; one of your own is a file parameters/NAME.yaml"
        raise UserError(f"no parameter set {profile!r}: {known}")
    default, over = (sets[name] for name in taken)
    return [
        Chapter(stem, profile, default.get(stem, {}) | over.get(stem, {}), (place, len(stems)), folders)
        for place, stem in enumerate(stems, start=1)
    ]


def _parameter_sets(folders: Folders, stems: list[str], taken: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Collect the sets of all chapters and of the folder ``parameters/``: set, stem, values; of those taken alone.

    Files for other sets are named and not read: what is wrong with them is no matter of this build.
    """
    sets: dict[str, dict[str, dict[str, Any]]] = {DEFAULT_PROFILE: {}, REAL_PROFILE: {}}
    for stem in stems:
        for name, values in _read_about(folders.code, chapter_name(stem)).parameters.items():
            sets.setdefault(name, {})[stem] = values or {}
    for file in sorted(folders.parameters.glob("*.yaml")):
        own = sets.setdefault(file.stem, {})
        for stem, values in _read_own_set(file, stems).items() if file.stem in taken else ():
            own[stem] = own.get(stem, {}) | (values or {})
    return sets


def _read_about(code: Path, name: str) -> About:
    """Read a ``chapter.yaml``; a chapter without one depends on all data."""
    file = code / name / "chapter.yaml"
    if not file.is_file():
        return About(data=["**/*"])
    form = "parameters: {<set>: {<parameter>: <value>}}, data: [<pattern>] and the like"
    with refusing(lambda error: f"{file} must hold {form} ({faults_of(error)})", ValidationError):
        return About.model_validate(read_yaml(file) or {})


def _read_own_set(file: Path, stems: list[str]) -> dict[str, dict[str, Any] | None]:
    content = read_yaml(file) or {}
    if not isinstance(content, dict) or not all(isinstance(values, dict | None) for values in content.values()):
        raise UserError(f"{file} must hold <chapter>: {{<parameter>: <value>}}")
    if unknown := [stem for stem in content if stem not in stems]:
        raise UserError(f"{file} names a chapter {unknown[0]!r} that does not exist (there are: {', '.join(stems)})")
    return content


def read_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook as JSON holds it."""
    with refusing(lambda error: f"{path} is not a notebook: {error}", ValueError):
        return json.loads(path.read_text("utf-8"))


def run_of(executed: Path) -> dict[str, Any]:
    """Read what was kept of the run that made an executed copy."""
    return json.loads(executed.read_text("utf-8"))["metadata"]["kvbook"]


def code_cells(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """List id and source of a notebook's code cells."""
    return [(c.get("id", ""), "".join(c["source"])) for c in notebook["cells"] if c["cell_type"] == "code"]


def _source_sha256(codes: Iterable[str]) -> str:
    modules: set[str] = set()
    for code in codes:
        # Magics and shell lines are notebook syntax, not Python's; they import nothing of ours.
        lines = ("" if line.lstrip().startswith(("%", "!")) else line for line in code.splitlines())
        # A cell that is not Python fails when it runs, with Python's own message; nothing to add here.
        with contextlib.suppress(SyntaxError):
            modules |= fingerprint.imports_of("\n".join(lines))
    return fingerprint.of_source(modules)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute and draw."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}
