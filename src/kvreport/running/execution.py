"""Running the book's chapters: which must run, and running one so that it either finished or never happened.

A chapter is a notebook in ``chapters/`` with no outputs. Running it makes
``_build/executed/<chapter>.ipynb``, whose metadata ``kvbook`` says what made it; :mod:`kvreport.site` shows
that copy's outputs with the source's prose. There is one way to run a chapter, and ``make book`` (through
dodo.py) and a plain ``jupyter-book build .`` both take it.

A copy is fresh as long as the digest in it equals the digest of everything that could change its outputs: the
code cells (not the prose), the parameters, the modules of this package that the notebook imports, directly or
through one another, the files under ``data/``, and the versions of the libraries that compute and draw.
Contents count, never dates, so a fresh clone or a restored cache is not taken for a change. An import by a
computed name is not seen.

On a processor of more than one core, chapters are executed two at a time. A cell tagged ``alone`` measures time: while it
runs, no cell of another chapter does, and it has every core; its chapter waits for that until all others have begun and
come to such a cell or to their ends. All other experiments use their share of the cores, also when no other chapter runs,
for their bits may depend on the number of threads.

While a chapter runs, its copy is ``<chapter>.partial.ipynb`` and its figures lie in a folder of their own;
both are moved into place when the last cell has succeeded. After a failure the partial copy stays, to be
looked at.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import yaml

from kvbook import fingerprint, paths
from kvbook.errors import UserError
from kvbook.progress import PROGRESS_VARIABLE
from kvbook.runs import privacy, records
from kvbook.runs.threads import THREADS_VARIABLE
from kvreport.publishing.page import CHAPTER_VARIABLE, FOLDER_VARIABLE
from kvreport.publishing.style import STYLE
from kvreport.running import kernel
from kvreport.running.exclusive import Stopped, Turn, Turns
from kvreport.running.screen import Job, Screen

PROFILE_VARIABLE = "PROFILE"
DEFAULT_PROFILE = "default"

# A new version of one of these may change what a chapter shows.
LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "scipy", "pandas", "matplotlib", "seaborn")

# How many chapters at a time; by default two, where that can do no harm.
JOBS_VARIABLE = "JOBS"
# The cells that must have the machine to themselves.
ALONE_TAG = "alone"

# How long the next chapter is held back for the one before it to queue up.
_SECONDS_TO_QUEUE = 1.0


class ChapterFailed(UserError):
    """A chapter did not run to its end; the message names it, the error and where the partial copy lies."""


@dataclass(frozen=True)
class Folders:
    """Where a book's parts lie; the defaults are this repository's."""

    chapters: Path = paths.CHAPTERS
    parameters: Path = paths.PARAMETERS
    data: Path = paths.DATA
    executed: Path = paths.EXECUTED
    figures: Path = paths.FIGURES


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
    rank
        Chapters begin by ascending ranks.
    folders
        The book it belongs to.
    """

    stem: str
    profile: str
    parameters: dict[str, Any]
    place: tuple[int, int] = (1, 1)
    rank: int = 0
    folders: Folders = field(default_factory=Folders)

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

    def inputs_sha256(self) -> str:
        """Digest everything that could change what the chapter shows."""
        cells = _code_cells(_read_notebook(self.source))
        digest = hashlib.sha256()

        def add(label: str, content: bytes | str) -> None:
            content = content.encode() if isinstance(content, str) else content
            # Lengths, so that moving text from one input to the next cannot leave the digest as it was.
            digest.update(f"{label} {len(content)}\n".encode() + content)

        for cell_id, code in cells:
            add(f"cell {cell_id}", code)
        add("parameters", json.dumps(self.parameters, sort_keys=True))
        add("source", _source_sha256(code for _, code in cells))
        add("style", fingerprint.of_file(STYLE))
        for file in _data_files(self.folders.data):
            add(f"data {file.relative_to(self.folders.data)}", fingerprint.of_file(file))
        add("versions", json.dumps(_versions()))
        return digest.hexdigest()

    def why_stale(self) -> str | None:
        """Say in a few words why the chapter must run; None when its copy is fresh."""
        if not self.executed.is_file():
            return "not executed yet"
        try:
            metadata = json.loads(self.executed.read_text("utf-8"))["metadata"]
            stored = metadata["kvbook"]
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

    def is_fresh(self) -> bool:
        """Whether the executed copy shows what running the chapter now would."""
        return self.why_stale() is None


def plan(profile: str | None = None, folders: Folders | None = None) -> list[Chapter]:
    """List the book's chapters with their parameters.

    Parameters
    ----------
    profile
        A file in ``parameters/``, laid over ``default.yaml``; the environment's ``PROFILE`` when left out.
    folders
        The book; this repository's when left out.

    Returns
    -------
    list of Chapter
        In the order of their names.
    """
    folders = folders or Folders()
    profile = profile or os.environ.get(PROFILE_VARIABLE) or DEFAULT_PROFILE
    if not re.fullmatch(r"\w[\w.-]*", profile):
        raise UserError(f"{profile!r} cannot name a parameter set: name a file in {folders.parameters}, without .yaml")
    stems = [path.stem for path in sorted(folders.chapters.glob("*.ipynb"))]
    # By name, unless the default set names them in another order.
    chosen: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys((DEFAULT_PROFILE, profile)):
        for stem, values in _read_parameters(folders.parameters, name, stems).items():
            chosen.setdefault(stem, {}).update(values)
        chosen |= {stem: {} for stem in stems if stem not in chosen}
    ranks = {stem: rank for rank, stem in enumerate(chosen)}
    return [
        Chapter(stem, profile, chosen[stem], (k, len(stems)), ranks[stem], folders)
        for k, stem in enumerate(stems, start=1)
    ]


class _House:
    """What the chapters that run side by side share: a place to say how far they are, turns, and cores.

    Parameters
    ----------
    out
        Where progress is written.
    jobs
        How many chapters may run at a time.
    forks
        Whether their kernels are forked from one process that has imported the libraries.
    """

    def __init__(self, out: TextIO | None, jobs: int, forks: bool = False) -> None:
        self.screen = Screen(out)
        self.turns = Turns(jobs)
        # How many an experiment may use that measures no time; all where None.
        self.threads = max(1, _cores() // jobs) if jobs > 1 else None
        self.forks = forks
        self.stopped = False
        self.kernels: set[Any] = set()

    def stop(self) -> None:
        """End everything at once: no further cell, and no kernel left."""
        self.stopped = True
        self.turns.stop()
        for manager in list(self.kernels):
            # It may end, or never have begun, at this very moment.
            with contextlib.suppress(ProcessLookupError, AttributeError):
                manager.provisioner.process.kill()


def bring_up_to_date(chapters: Iterable[Chapter], out: TextIO | None = None) -> list[Chapter]:
    """Execute the chapters whose copies are not fresh; return those.

    Another process that executes one of them is waited for. One that fails keeps none of the others from being executed.

    Parameters
    ----------
    chapters
        From :func:`plan`.
    out
        Where progress is written; standard error when left out.

    Raises
    ------
    ChapterFailed
        When at least one failed: a line for each.
    UserError
        When the environment's ``JOBS`` is no number of jobs.
    """
    chapters = list(chapters)
    jobs = _jobs(chapters)
    stale = sorted((chapter for chapter in chapters if not chapter.is_fresh()), key=lambda chapter: chapter.rank)
    house = _House(out, jobs, _may_fork(stale, jobs))
    executed: list[Chapter] = []
    failures: list[str] = []

    def bring(chapter: Chapter, queued: threading.Event) -> None:
        try:
            if _bring_up_to_date(chapter, house, queued):
                executed.append(chapter)
        except Stopped:
            # Before it began.
            pass
        except UserError as error:
            failures.append(str(error))
        finally:
            queued.set()

    # In threads even where there is one: an interruption then comes to this one, and not to whoever waits for a kernel.  One
    # for each chapter, since one that waits to be alone makes room; but where chapters go one after the other, a model must
    # not stay in memory while another chapter runs.
    with ThreadPoolExecutor(jobs if jobs == 1 else max(1, len(stale))) as pool:
        try:
            futures = []
            for chapter in stale:
                queued = threading.Event()
                futures.append(pool.submit(bring, chapter, queued))
                # They begin in their order, but for those that another process is at.
                if jobs > 1:
                    queued.wait(_SECONDS_TO_QUEUE)
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            house.stop()
            raise
    if failures:
        raise ChapterFailed("\n".join(failures))
    return executed


def _bring_up_to_date(chapter: Chapter, house: _House, queued: threading.Event) -> bool:
    """Execute a chapter, if that is still needed, with nobody else at it; say whether it was."""
    folder = chapter.folders.executed
    with contextlib.ExitStack() as held:
        with records.writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # A chapter each, so that several processes can execute a book together.
            lock = records.alone(folder / f".{chapter.stem}.lock", f"executes chapter {chapter.stem}")
            held.enter_context(lock)
        # Asked again: whoever was waited for may have executed it.
        if house.stopped or (why := chapter.why_stale()) is None:
            return False
        _execute(chapter, why, house, queued)
        return True


def _jobs(chapters: list[Chapter]) -> int:
    """How many chapters to execute at a time."""
    asked = os.environ.get(JOBS_VARIABLE)
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise UserError(f"JOBS={asked} is no number of jobs: give 1 or more, or leave it out")
        return int(asked)
    # One accelerator, and the memory for one set of full-size weights, are what most people have.
    for chapter in chapters:
        given = chapter.parameters
        if given.get("weights") == "hub" or "/" in str(given.get("model", "")):
            return 1
    return min(2, _cores()) if _on_a_processor(chapters) else 1


def _on_a_processor(chapters: list[Chapter]) -> bool:
    return all(chapter.parameters.get("device", "cpu") == "cpu" for chapter in chapters)


def _may_fork(chapters: list[Chapter], jobs: int) -> bool:
    """Whether to fork these chapters' kernels: for one or two, to import the libraries for all takes as long as for each.

    A process that has used an accelerator, or Apple's libraries, cannot be forked.
    """
    return len(chapters) > max(2, jobs) and _on_a_processor(chapters) and sys.platform == "linux"


def _cores() -> int:
    # As torch counts its threads: what the user has set, else the cores that this process may use.
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else len(os.sched_getaffinity(0))


def execute(chapter: Chapter, why: str | None = None, out: TextIO | None = None) -> Path:
    """Run a chapter from its first cell to its last.

    Parameters
    ----------
    chapter
        From :func:`plan`.
    why
        Why it must run, for the progress line.
    out
        Where progress is written; standard error when left out.

    Returns
    -------
    pathlib.Path
        The executed copy.

    Raises
    ------
    ChapterFailed
        With one line that says which chapter, what error, and where its partial copy lies.
    UserError
        When a parameter is given that the chapter does not have.
    """
    return _execute(chapter, why, _House(out, _jobs([chapter])))


def _execute(chapter: Chapter, why: str | None, house: _House, queued: threading.Event | None = None) -> Path:
    with house.turns.place() as turn:
        turn.begin(queued)
        return _execute_in_turn(chapter, why, house, turn)


def _execute_in_turn(chapter: Chapter, why: str | None, house: _House, turn: Turn) -> Path:
    import papermill
    from papermill.exceptions import PapermillExecutionError

    # What it would log of a kernel that ended, the one line of a failure says better.
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    _refuse_without_parameters_cell(chapter)
    known = papermill.inspect_notebook(chapter.source)
    _refuse_unknown_parameters(chapter, known)
    with records.writable(chapter.folders.executed):
        chapter.executed.parent.mkdir(parents=True, exist_ok=True)
    staged = chapter.figures.with_name(f".{chapter.stem}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    # Taken before the run: whoever edits a file meanwhile gets a stale copy, not a wrongly fresh one.
    inputs_sha256 = chapter.inputs_sha256()
    started, clock, waited = datetime.now(UTC), time.monotonic(), 0.0
    place, count = chapter.place
    head = f"chapter {place} of {count}: {chapter.stem}"
    code_cells = len(_code_cells(_read_notebook(chapter.source))) + bool(chapter.parameters)
    with (
        tempfile.TemporaryDirectory(prefix="kvbook-") as scratch,
        Job(house.screen, head, why, code_cells) as job,
    ):
        job.progress_file = Path(scratch) / "progress"
        settings = {
            CHAPTER_VARIABLE: chapter.stem,
            FOLDER_VARIABLE: str(staged),
            PROGRESS_VARIABLE: str(job.progress_file),
            **kernel.QUIET,
        }
        if house.threads is not None:
            settings[THREADS_VARIABLE] = str(house.threads)

        def begin(cell: Mapping[str, Any], **_: Any) -> None:
            nonlocal waited
            if cell["cell_type"] == "code":
                asked = time.monotonic()
                job.wait()
                turn.take(alone=ALONE_TAG in cell["metadata"].get("tags", ()))
                job.next_step()
                waited += time.monotonic() - asked

        try:
            notebook = papermill.execute_notebook(
                chapter.source,
                chapter.partial,
                parameters=chapter.parameters,
                kernel_name="python3",
                progress_bar=False,
                kernel_manager_class=_own_interpreter(settings, chapter.folders.chapters, house),
                # Everything is here when the last cell is done; taking its modules apart would cost the kernel a second or two.
                shutdown_kernel="immediate",
                on_cell_start=begin,
            )
        except PapermillExecutionError as error:
            _remove_secrets(chapter.partial)
            raise ChapterFailed(_failure(chapter, f"{error.ename}: {error.evalue}")) from None
        except Exception as error:
            _remove_secrets(chapter.partial)
            job.interrupted = house.stopped
            # The kernel died (out of memory, a crash in C code) or never started: papermill tells these
            # by many types, and for the reader they are one thing.
            raise ChapterFailed(_failure(chapter, f"{type(error).__name__}: {error}")) from error
    _refuse_secrets(chapter, notebook, staged)
    # Imports torch, for seconds, so only behind the cells: none of them has to wait for it.
    from kvbook.runs import machine

    notebook.metadata["kvbook"] = {
        "inputs_sha256": inputs_sha256,
        "profile": chapter.profile,
        "parameters": chapter.parameters,
        "started": started.isoformat(timespec="seconds"),
        # Of its own cells, not of those that it let go first.
        "duration_s": round(time.monotonic() - clock - waited, 1),
        "machine": machine.describe(_value(chapter, known, "device") or "cpu"),
        "model": _value(chapter, known, "model"),
        "weights": _value(chapter, known, "weights"),
        # Of the experiments that measure no time; None where they have all that the machine line says.
        "shared_threads": house.threads,
        "versions": _versions(),
        "commit": machine.commit(),
        "files": {f.name: fingerprint.of_file(f) for f in sorted(staged.glob("*")) if not f.name.startswith(".")},
    }
    with records.writable(chapter.folders.executed):
        chapter.partial.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        _replace_folder(staged, chapter.figures)
        # Last: a copy in place vouches for the figures, never the other way round.
        chapter.partial.replace(chapter.executed)
    return chapter.executed


def _read_parameters(folder: Path, profile: str, stems: list[str]) -> dict[str, dict[str, Any]]:
    file = folder / f"{profile}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        raise UserError(f"no parameter set {profile!r}: {file} does not exist (there are: {known})")
    try:
        content = yaml.safe_load(file.read_text("utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(v, dict | None) for v in content.values()):
        raise UserError(f"{file} must hold <chapter>: {{<parameter>: <value>}}")
    for stem in content:
        if stem not in stems:
            raise UserError(f"{file} names a chapter {stem!r} that does not exist (there are: {', '.join(stems)})")
    return {stem: values or {} for stem, values in content.items()}


def _refuse_without_parameters_cell(chapter: Chapter) -> None:
    # papermill would put this run's parameters before the first cell, or, without any, say nothing.
    cells = _read_notebook(chapter.source).get("cells", [])
    if not any("parameters" in cell.get("metadata", {}).get("tags", ()) for cell in cells):
        raise UserError(f"chapter {chapter.stem} has no cell tagged parameters: tag the one that holds its defaults")


def _refuse_unknown_parameters(chapter: Chapter, known: Mapping[str, Any]) -> None:
    # papermill itself only logs "Passed unknown parameter" and runs on with the default in place of what was
    # meant.
    for name in chapter.parameters:
        if name not in known:
            raise UserError(
                f"chapter {chapter.stem} has no parameter {name!r} (profile {chapter.profile}); "
                f"it has: {', '.join(known) or 'none'}"
            )


def _value(chapter: Chapter, known: Mapping[str, Any], name: str) -> str | None:
    """Give a text parameter as the chapter ran with it; None where it has no such parameter."""
    if name not in known:
        return None
    return str(chapter.parameters.get(name, known[name]["default"].strip("\"'")))


def _own_interpreter(settings: Mapping[str, str], folder: Path, house: _House) -> type:
    """Return a kernel manager that runs this interpreter, whatever kernelspec named python3 is installed.

    Environment and folder are the kernel's own: this process may run several, and has but one of each.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class OwnInterpreter(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(argv=kernel.command(), display_name="Python 3", language="python")

        async def start_kernel(self, **options: Any) -> None:
            house.kernels.add(self)
            await super().start_kernel(**options, env={**os.environ, **settings}, cwd=str(folder))
            # A process that was begun while everything was being stopped.
            if house.stopped:
                house.stop()

        async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
            if not house.forks:
                await super()._async_launch_kernel(kernel_cmd, **options)
                return
            launched = self.provisioner
            launched.process = kernel.Forked(kernel_cmd, options["env"], options["cwd"])
            launched.pid = launched.pgid = launched.process.pid

    return OwnInterpreter


def _refuse_secrets(chapter: Chapter, notebook: Mapping[str, Any], staged: Path) -> None:
    """Refuse a result that holds a secret of this environment: what is executed is published."""
    texts = {"its outputs": json.dumps(notebook, ensure_ascii=False)}
    # A picture's own bytes hold none; what is drawn as text stands in the SVG and in the rows.
    texts |= {f.name: f.read_text("utf-8", "replace") for f in sorted(staged.glob("*")) if f.suffix in (".svg", ".csv")}
    found = [f"{kind} in {where}" for where, text in texts.items() for kind in privacy.secrets_in(text)]
    if found:
        chapter.partial.unlink(missing_ok=True)
        shutil.rmtree(staged, ignore_errors=True)
        raise ChapterFailed(f"chapter {chapter.stem} would publish {'; '.join(found)}: nothing of this run was kept")


def _remove_secrets(file: Path) -> None:
    if file.is_file() and privacy.secrets_in(text := file.read_text("utf-8")):
        file.write_text(privacy.without_secrets(text), "utf-8")


def _failure(chapter: Chapter, error: str) -> str:
    kept = f"; what ran is in {_short(chapter.partial)}" if chapter.partial.is_file() else ""
    return f"chapter {chapter.stem} failed: {privacy.without_secrets(' '.join(error.split()))}{kept}"


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _replace_folder(new: Path, final: Path) -> None:
    # Renames, so that a kill leaves the old folder, none, or the new one, and never a mixture; a copy whose
    # figures are not these is seen as stale by their digests.
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.is_dir():
        final.rename(old)
    if new.is_dir():
        new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _read_notebook(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a notebook: {error}") from None


def _code_cells(notebook: dict[str, Any]) -> list[tuple[str, str]]:
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


def _data_files(folder: Path) -> list[Path]:
    # Prose about the data changes nothing that a chapter computes; a dot file is somebody's half-written one.
    files = (f for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else ()
    return sorted(f for f in files if f.suffix != ".md" and not f.name.startswith("."))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return versions
