"""Executing the book's chapters, so that each either finished or never happened.

Running a chapter makes ``_build/executed/<chapter>.ipynb``, whose metadata ``kvbook`` says what made it;
:mod:`kvreport.site` shows that copy's outputs with the source's prose. There is one way to run a chapter, and ``make
book`` (`kvbook build`) and a plain ``jupyter-book build .`` both take it.

Experiments that need the machine to themselves are measured first, one after the other: one process measures them, and
the notebooks find their runs.  What fails is left to its notebook, which shows how far it came.  Then papermill
executes the notebooks of the stale chapters, two at a time on a processor of more than one core, in as many kernels
(:mod:`kvreport.running.kernels`).

While a chapter runs, its copy is ``<chapter>.partial.ipynb`` and its figures lie in a folder of their own;
both are moved into place when the last cell has succeeded. After a failure the partial copy stays, to be
looked at.
"""

import contextlib
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from kvbook import UserError, fingerprint, progress
from kvbook.diagnosis import cores
from kvbook.runs import machine, privacy, records
from kvreport import publishing
from kvreport.publishing import evaluated, found
from kvreport.running.planning import DEFAULT_PROFILE, Chapter, code_cells, read_notebook, run_of, versions

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from kvreport.running.kernels import Build


class ChapterFailed(UserError):
    """A chapter did not run to its end; the message names it, the error and where the partial copy lies."""


def bring_up_to_date(chapters: Iterable[Chapter], out: TextIO | None = None) -> list[Chapter]:
    """Execute the chapters whose copies are not fresh; return those.

    Another process that executes one of them is waited for. One that fails keeps none of the others from being
    executed.

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
    if not (stale := [chapter for chapter in chapters if chapter.why_stale()]):
        return []
    # Those that measure most begin, so that none of them runs alone at the end.
    stale.sort(key=_count_of_experiments, reverse=True)
    # With Jupyter's client, for which a build with nothing to do need not wait.
    from kvreport.running.kernels import Build

    build = Build(out, jobs)
    executed: list[Chapter] = []
    failures: list[str] = []

    def bring(chapter: Chapter, measured_s: float) -> None:
        try:
            if _execute_unless_fresh(chapter, build, measured_s):
                executed.append(chapter)
        except UserError as error:
            failures.append(str(error))

    to_measure = [chapter for chapter in stale if jobs > 1 and chapter.about.alone and chapter.runs_kept() is None]
    asked = [(chapter.stem, chapter.package, chapter.values(), chapter.left_out) for chapter in to_measure]
    measured, all_of_it = measure_alone(asked, build)
    # What could not be measured is tried again by its notebook, which is to be alone as well.
    build.timing = jobs == 1 or not all_of_it
    # In a thread even where there is one: an interruption then comes to this one, and not to whoever waits for a
    # kernel.
    with contextlib.closing(build), ThreadPoolExecutor(1 if build.timing else jobs) as pool:
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


def measure_alone(
    asked: list[tuple[str, str, dict[str, Any], list[str]]], build: "Build"
) -> tuple[dict[str, float], bool]:
    """Measure what needs the machine; return the seconds by chapter, and whether all of it succeeded.

    Chapters ask for it by their stems, packages and parameters, but for what they leave out.
    """
    if not asked:
        return {}, True
    with (
        tempfile.TemporaryDirectory(prefix="kvbook-") as scratch,
        build.screen.job("measuring what nothing may run beside") as job,
    ):
        job.progress_file, took = Path(scratch) / "progress", Path(scratch) / "took"
        environment = os.environ | build.environment | {progress.PROGRESS_VARIABLE: str(job.progress_file)}
        command = [sys.executable, "-m", __name__, json.dumps(asked), str(took)]
        # It ends when this end of the pipe is closed, however this process ends. A group of its own: Ctrl-C on a
        # terminal goes to the build.
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True) as process:
            status = process.wait()
        return json.loads(took.read_text()) if took.is_file() else {}, status == 0


def _main(asked: list[list[Any]], took: Path) -> int:
    """Measure in this process, note the seconds, and return how many failed."""
    threading.Thread(target=_end_with_the_build, daemon=True).start()
    seconds: Counter[str] = Counter()
    failed = 0
    for stem, package, values, left_out in asked:
        for experiment in found.experiments(package):
            if experiment.name in left_out or not experiment.needs_the_machine:
                continue
            began = time.monotonic()
            try:
                with progress.headed(f"{stem}: {experiment.name}"):
                    experiment.run(experiment.settings.checked(**values))
            except Exception:  # Its notebook will say what is wrong.
                failed += 1
            seconds[stem] += time.monotonic() - began
            took.write_text(json.dumps(seconds))
    return failed


def _end_with_the_build() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _count_of_experiments(chapter: Chapter) -> int:
    published = {name for group in chapter.about.evidence for name in group.experiments}
    return len(published.difference(chapter.left_out))


def _execute_unless_fresh(chapter: Chapter, build: "Build", measured_s: float) -> bool:
    """Execute a chapter, if that is still needed, with nobody else at it; say whether it was."""
    # A chapter each, so that several processes can execute a book together.
    with records.alone(chapter.folders.executed / f".{chapter.stem}.lock", f"executes chapter {chapter.stem}"):
        # Asked again: whoever was waited for may have executed it.
        if build.stopped or (why := chapter.why_stale()) is None:
            return False
        _execute(chapter, why, build, measured_s)
    # While other chapters run: pages are written one after the other.  What is wrong with it, the page says.
    with contextlib.suppress(Exception):
        evaluated.own(chapter.name, run_of(chapter.executed)["measured"]["runs"])
    return True


def _jobs(chapters: list[Chapter]) -> int:
    """How many chapters to execute at a time: by default two, where that can do no harm."""
    if asked := os.environ.get("JOBS"):
        if not asked.isdecimal() or int(asked) < 1:
            raise UserError(f"JOBS={asked} is no number of jobs: give 1 or more, or leave it out")
        return int(asked)
    # One accelerator, and the memory for one set of full-size weights, are what most people have.
    given = [chapter.parameters for chapter in chapters]
    weights = {one.get("weights") for one in given}
    large = any("/" in str(one.get("model", "")) or one.get("device", "cpu") != "cpu" for one in given)
    # Bytes that must be free for two chapters with the packages' trained model, which each keeps in several dtypes.
    short = "package" in weights and psutil.virtual_memory().available < 10e9
    return 1 if large or "hub" in weights or short else min(2, cores.as_torch_counts())


def _execute(chapter: Chapter, why: str, build: "Build", measured_s: float) -> None:
    """Run a chapter from its first cell to its last, and put its copy and figures in place."""
    values = _values(chapter)
    with records.writable(chapter.folders.executed):
        chapter.executed.parent.mkdir(parents=True, exist_ok=True)
    staged = chapter.figures.with_name(f".{chapter.stem}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    # Taken before the run: whoever edits a file meanwhile gets a stale copy, not a wrongly fresh one.
    inputs_sha256, measured_sha256, kept = chapter.inputs_sha256(), chapter.measured_sha256(), chapter.runs_kept()
    # Of a chapter that is only drawn again, the machine is still the one that measured.
    measured_on = kept and run_of(chapter.executed)["machine"]
    started, clock = datetime.now(UTC), time.monotonic()
    notebook = _run(chapter, why, build, staged, kept)
    _refuse_secrets(chapter, notebook, staged)
    # Imports pandas: only after the cells, so that none of them has to wait for it.
    from kvreport.publishing import published

    notebook.metadata["kvbook"] = {
        "inputs_sha256": inputs_sha256, "measured": {"sha256": measured_sha256, "runs": published.measured(notebook)},
        "profile": chapter.profile, "parameters": chapter.parameters,
        "started": started.isoformat(timespec="seconds"),
        # With what its experiments took, which were measured first.
        "duration_s": round(time.monotonic() - clock + measured_s, 1),
        "machine": measured_on or _here(values.get("device", "cpu")),
        "model": values.get("model"), "weights": values.get("weights"),
        # Of the experiments that measure no time; None where they have all that the machine line says.
        "shared_threads": build.threads,
        "versions": versions(), "commit": machine.commit(),
        "files": {f.name: fingerprint.of_file(f) for f in sorted(staged.glob("*")) if not f.name.startswith(".")},
    }
    with records.writable(chapter.folders.executed):
        chapter.partial.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        # A kill leaves an old copy without all of its figures, which their digests then show to be stale.
        shutil.rmtree(chapter.figures, ignore_errors=True)
        if staged.is_dir():
            staged.rename(chapter.figures)
        # Last: a copy in place vouches for the figures, never the other way round.
        chapter.partial.replace(chapter.executed)


def _here(device: str) -> dict[str, Any]:
    """Describe what chapters run on; a processor without torch, for which a build would wait."""
    return machine.of_processor(cores.as_torch_counts()) if device == "cpu" else machine.describe(device)


def _values(chapter: Chapter) -> dict[str, Any]:
    """Return what the chapter runs with; refuse what papermill would leave out with a remark in its log."""
    defaults = chapter.defaults()
    if defaults is None:
        raise UserError(f"chapter {chapter.stem} has no cell tagged parameters: tag the one that holds its defaults")
    # A chapter's settings hold more than its notebook has parameters.
    known = dict.fromkeys([*defaults, *sorted(chapter.setting_names())])
    for name in chapter.parameters:
        if name not in known:
            it_has = f"(profile {chapter.profile}); it has: {', '.join(known) or 'none'}"
            raise UserError(f"chapter {chapter.stem} has no parameter {name!r} {it_has}")
    return defaults | chapter.parameters


def environment(chapter: Chapter, staged: Path, kept: Mapping[str, str] | None) -> dict[str, str]:
    """Tell a chapter's cells where its figures go, and which runs they are drawn from."""
    return {
        publishing.CHAPTER_VARIABLE: chapter.stem, publishing.FOLDER_VARIABLE: str(staged),
        publishing.BOOK_VARIABLE: "1" if chapter.profile == DEFAULT_PROFILE else "",
        publishing.MEASURED_VARIABLE: json.dumps(kept) if kept else "",
        publishing.LEFT_OUT_VARIABLE: ",".join(chapter.left_out),
    }


def _run(chapter: Chapter, why: str, build: "Build", staged: Path, kept: Mapping[str, str] | None) -> "NotebookNode":
    """Have papermill execute the notebook, and say how far it is."""
    import papermill
    from papermill.exceptions import PapermillExecutionError

    # What it would log of a kernel that ended, the one line of a failure says better.
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    here, (place, count) = Path.cwd(), chapter.place
    steps = itertools.count(1)
    n_steps = len(code_cells(read_notebook(chapter.source))) + bool(chapter.parameters)
    with (
        tempfile.TemporaryDirectory(prefix="kvbook-") as scratch,
        build.screen.job(f"chapter {place} of {count}: {chapter.stem}", why) as job,
    ):
        job.progress_file = Path(scratch) / "progress"
        said = {progress.PROGRESS_VARIABLE: str(job.progress_file)}

        def begin(cell: Mapping[str, Any], **_: Any) -> None:
            if cell["cell_type"] == "code":
                job.said = f"cell {next(steps)} of {n_steps}"

        try:
            variables = build.environment | environment(chapter, staged, kept) | said
            with build.kernel(variables, chapter.folders.chapters) as kernel:
                return papermill.execute_notebook(
                    chapter.source, chapter.partial, parameters=chapter.parameters, kernel_name="python3", km=kernel,
                    progress_bar=False, on_cell_start=begin,
                )
        except Exception as error:
            if chapter.partial.is_file() and privacy.secrets_in(text := chapter.partial.read_text("utf-8")):
                chapter.partial.write_text(privacy.without_secrets(text), "utf-8")
            job.interrupted = build.stopped
            # Or the kernel died (out of memory, a crash in C code) or never started: papermill tells these
            # by many types, and for the reader they are one thing.
            failed = isinstance(error, PapermillExecutionError)
            told = f"{error.ename}: {error.evalue}" if failed else f"{type(error).__name__}: {error}"
            told = privacy.without_secrets(" ".join(told.split()))
            partial = chapter.partial.relative_to(here) if chapter.partial.is_relative_to(here) else chapter.partial
            kept = f"; what ran is in {partial}" if partial.is_file() else ""
            raise ChapterFailed(f"chapter {chapter.stem} failed: {told}{kept}") from None


def _refuse_secrets(chapter: Chapter, notebook: Mapping[str, Any], staged: Path) -> None:
    """Refuse a result that holds a secret of this environment: what is executed is published."""
    texts = {"its outputs": json.dumps(notebook, ensure_ascii=False)}
    # A picture's own bytes hold none; what is drawn as text stands in the SVG and in the rows.
    texts |= {f.name: f.read_text("utf-8", "replace") for f in sorted(staged.glob("*")) if f.suffix in (".svg", ".csv")}
    named = [f"{kind} in {where}" for where, text in texts.items() for kind in privacy.secrets_in(text)]
    if named:
        chapter.partial.unlink(missing_ok=True)
        shutil.rmtree(staged, ignore_errors=True)
        raise ChapterFailed(f"chapter {chapter.stem} would publish {'; '.join(named)}: nothing of this run was kept")


if __name__ == "__main__":
    sys.exit(min(1, _main(json.loads(sys.argv[1]), Path(sys.argv[2]))))
