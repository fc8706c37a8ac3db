"""Executing the book's chapters: measure, then draw, so that each chapter either finished or never happened.

Running a chapter makes ``_build/executed/<chapter>.ipynb``, whose metadata ``kvbook`` says what made it;
:mod:`kvreport.site` shows that copy's outputs with the source's prose. There is one way to run a chapter, and ``make book``
(`kvbook build`) and a plain ``jupyter-book build .`` both take it.

First everything is measured that the stale chapters show (:mod:`kvreport.running.measuring`); then their notebooks are
executed, two at a time on a processor of more than one core, and find their runs.

While a chapter runs, its copy is ``<chapter>.partial.ipynb`` and its figures lie in a folder of their own;
both are moved into place when the last cell has succeeded. After a failure the partial copy stays, to be
looked at.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from kvbook import fingerprint
from kvbook.errors import UserError
from kvbook.progress import PROGRESS_VARIABLE
from kvbook.runs import privacy, records
from kvbook.runs.threads import THREADS_VARIABLE
from kvreport.publishing import BOOK_VARIABLE, CHAPTER_VARIABLE, FOLDER_VARIABLE
from kvreport.running import kernel, measuring
from kvreport.running.build import Build, cores
from kvreport.running.planning import DEFAULT_PROFILE, Chapter, code_cells, read_notebook, versions
from kvreport.running.screen import Job

# How many chapters at a time; by default two, where that can do no harm.
JOBS_VARIABLE = "JOBS"


class ChapterFailed(UserError):
    """A chapter did not run to its end; the message names it, the error and where the partial copy lies."""


def bring_up_to_date(chapters: Iterable[Chapter], out: TextIO | None = None) -> list[Chapter]:
    """Execute the chapters whose copies are not fresh; return those.

    Another process that executes one of them is waited for. One that fails keeps none of the others from being executed.

    Parameters
    ----------
    chapters
        From :func:`kvreport.running.planning.plan`.
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
    stale = [chapter for chapter in chapters if not chapter.is_fresh()]
    build = Build(out, jobs, _may_fork(stale, jobs))
    executed: list[Chapter] = []
    failures: list[str] = []

    def bring(chapter: Chapter, measured_s: float) -> None:
        try:
            if _bring_up_to_date(chapter, build, measured_s):
                executed.append(chapter)
        except UserError as error:
            failures.append(str(error))

    measured = measuring.measure(stale, build)
    # In threads even where there is one: an interruption then comes to this one, and not to whoever waits for a kernel.
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in [pool.submit(bring, chapter, measured.get(chapter.stem, 0.0)) for chapter in stale]:
                future.result()
        except BaseException:
            # Before the pool is left, which waits for what runs.
            build.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failures:
        raise ChapterFailed("\n".join(failures))
    return executed


def _bring_up_to_date(chapter: Chapter, build: Build, measured_s: float) -> bool:
    """Execute a chapter, if that is still needed, with nobody else at it; say whether it was."""
    folder = chapter.folders.executed
    with contextlib.ExitStack() as held:
        with records.writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # A chapter each, so that several processes can execute a book together.
            lock = records.alone(folder / f".{chapter.stem}.lock", f"executes chapter {chapter.stem}")
            held.enter_context(lock)
        # Asked again: whoever was waited for may have executed it.
        if build.stopped or (why := chapter.why_stale()) is None:
            return False
        _execute(chapter, why, build, measured_s)
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
        if given.get("weights") in ("hub", "package") or "/" in str(given.get("model", "")):
            return 1
    return min(2, cores()) if _on_a_processor(chapters) else 1


def _on_a_processor(chapters: list[Chapter]) -> bool:
    return all(chapter.parameters.get("device", "cpu") == "cpu" for chapter in chapters)


def _may_fork(chapters: list[Chapter], jobs: int) -> bool:
    """Whether to fork what computes from one process that has imported the libraries.

    It pays where several experiments or many notebooks would each import them.  A process that has used an accelerator, or
    Apple's libraries, cannot be forked.
    """
    many = len(chapters) > max(2, jobs) or any(measuring.has_experiments(chapter) for chapter in chapters)
    return many and _on_a_processor(chapters) and sys.platform == "linux"


def execute(chapter: Chapter, why: str | None = None, out: TextIO | None = None) -> Path:
    """Run a chapter from its first cell to its last.

    Parameters
    ----------
    chapter
        From :func:`kvreport.running.planning.plan`.
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
    return _execute(chapter, why, Build(out, _jobs([chapter])))


def _execute(chapter: Chapter, why: str | None, build: Build, measured_s: float = 0.0) -> Path:
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
    started, clock = datetime.now(UTC), time.monotonic()
    place, count = chapter.place
    head = f"chapter {place} of {count}: {chapter.stem}"
    steps = len(code_cells(read_notebook(chapter.source))) + bool(chapter.parameters)
    with (
        tempfile.TemporaryDirectory(prefix="kvbook-") as scratch,
        Job(build.screen, head, why, steps) as job,
    ):
        job.progress_file = Path(scratch) / "progress"
        settings = {
            CHAPTER_VARIABLE: chapter.stem,
            FOLDER_VARIABLE: str(staged),
            PROGRESS_VARIABLE: str(job.progress_file),
            BOOK_VARIABLE: "1" if chapter.profile == DEFAULT_PROFILE else "",
            **kernel.QUIET,
        }
        if build.threads is not None:
            settings[THREADS_VARIABLE] = str(build.threads)

        def begin(cell: Mapping[str, Any], **_: Any) -> None:
            if cell["cell_type"] == "code":
                job.next_step()

        try:
            notebook = papermill.execute_notebook(
                chapter.source,
                chapter.partial,
                parameters=chapter.parameters,
                kernel_name="python3",
                progress_bar=False,
                kernel_manager_class=_own_interpreter(settings, chapter.folders.chapters, build),
                # Everything is here when the last cell is done; taking its modules apart would cost the kernel a second or two.
                shutdown_kernel="immediate",
                on_cell_start=begin,
            )
        except PapermillExecutionError as error:
            _remove_secrets(chapter.partial)
            raise ChapterFailed(_failure(chapter, f"{error.ename}: {error.evalue}")) from None
        except Exception as error:
            _remove_secrets(chapter.partial)
            job.interrupted = build.stopped
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
        # With what its experiments took, which were measured first.
        "duration_s": round(time.monotonic() - clock + measured_s, 1),
        "machine": machine.describe(_value(chapter, known, "device") or "cpu"),
        "model": _value(chapter, known, "model"),
        "weights": _value(chapter, known, "weights"),
        # Of the experiments that measure no time; None where they have all that the machine line says.
        "shared_threads": build.threads,
        "versions": versions(),
        "commit": machine.commit(),
        "files": {f.name: fingerprint.of_file(f) for f in sorted(staged.glob("*")) if not f.name.startswith(".")},
    }
    with records.writable(chapter.folders.executed):
        chapter.partial.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        _replace_folder(staged, chapter.figures)
        # Last: a copy in place vouches for the figures, never the other way round.
        chapter.partial.replace(chapter.executed)
    return chapter.executed


def _refuse_without_parameters_cell(chapter: Chapter) -> None:
    # papermill would put this run's parameters before the first cell, or, without any, say nothing.
    cells = read_notebook(chapter.source).get("cells", [])
    if not any("parameters" in cell.get("metadata", {}).get("tags", ()) for cell in cells):
        raise UserError(f"chapter {chapter.stem} has no cell tagged parameters: tag the one that holds its defaults")


def _refuse_unknown_parameters(chapter: Chapter, known: Mapping[str, Any]) -> None:
    # papermill itself only logs "Passed unknown parameter" and runs on with the default in place of what was
    # meant. A setting that the notebook has no parameter for is read beside those that it has.
    for name in chapter.parameters:
        if name not in known and name not in chapter.setting_names():
            raise UserError(
                f"chapter {chapter.stem} has no parameter {name!r} (profile {chapter.profile}); "
                f"it has: {', '.join(known) or 'none'}"
            )


def _value(chapter: Chapter, known: Mapping[str, Any], name: str) -> str | None:
    """Give a text parameter as the chapter ran with it; None where it has no such parameter."""
    if name not in known:
        return None
    return str(chapter.parameters.get(name, known[name]["default"].strip("\"'")))


def _own_interpreter(settings: Mapping[str, str], folder: Path, build: Build) -> type:
    """Return a kernel manager that runs this interpreter, whatever kernelspec named python3 is installed.

    Environment and folder are the kernel's own: this process may run several, and has but one of each.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class OwnInterpreter(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(argv=kernel.command(), display_name="Python 3", language="python")

        def kill(self) -> None:
            """End the kernel, as `Build.stop` asks of whatever runs."""
            self.provisioner.process.kill()

        async def start_kernel(self, **options: Any) -> None:
            build.processes.add(self)
            await super().start_kernel(**options, env={**os.environ, **settings}, cwd=str(folder))
            # A process that was begun while everything was being stopped.
            if build.stopped:
                build.stop()

        async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
            if not build.forks:
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
