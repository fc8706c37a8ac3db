"""The first two phases of a build: measure what the chapters show, before any notebook is executed.

Experiments that measure no time run side by side, each in a process of its own on its share of the threads.  Those that
measure time follow, one after the other, with nothing beside them.  A notebook that is executed afterwards finds its runs.

What cannot be measured is left to the notebook: executing it gives the same error, and a copy that shows how far it came.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

from kvbook.errors import UserError
from kvbook.progress import PROGRESS_VARIABLE
from kvbook.runs.threads import THREADS_VARIABLE
from kvreport.publishing import chapter_name, evaluated
from kvreport.running import child, kernel
from kvreport.running.build import Build
from kvreport.running.planning import Chapter
from kvreport.running.screen import Job


class Asked(NamedTuple):
    """What a chapter asks to be measured.

    Attributes
    ----------
    stem : str
        The chapter's notebook.
    module : str
        Its module that lists the experiments.
    values : dict
        Its parameters.
    """

    stem: str
    module: str
    values: dict[str, Any]


class Task(NamedTuple):
    """One experiment that is to be measured; `alone` when nothing may run beside it."""

    asked: Asked
    experiment: str
    alone: bool
    after: tuple[str, ...]


def has_experiments(chapter: Chapter) -> bool:
    """Tell whether a chapter lists experiments."""
    return (chapter.folders.code / chapter.name / "results.py").is_file()


def measure(chapters: Iterable[Chapter], build: Build) -> dict[str, float]:
    """Measure what chapters show and has not been measured."""
    asked = [
        Asked(chapter.stem, f"kvreport.chapters.{chapter.name}.results", chapter.values())
        for chapter in chapters
        if has_experiments(chapter)
    ]
    return measure_asked(asked, build) if asked else {}


def measure_asked(asked: list[Asked], build: Build) -> dict[str, float]:
    """Measure what is asked for: side by side what measures no time, then the rest, one by one."""
    seconds: Counter[str] = Counter()
    found = _in_a_process(missing, asked, build=build, progress=None) or []
    tasks = [_task(fields) for fields in found]
    shared = [task for task in tasks if not task.alone]
    # What waits for another one comes last, so that no place is held by who waits.
    shared.sort(key=lambda task: bool(task.after))
    done = {(task.asked.stem, task.experiment): threading.Event() for task in shared}

    def go(task: Task) -> None:
        began = time.monotonic()
        try:
            for name in task.after:
                if (task.asked.stem, name) in done:
                    done[task.asked.stem, name].wait()
            if not build.stopped:
                began = time.monotonic()
                _measure_one(task, build)
        finally:
            done.get((task.asked.stem, task.experiment), threading.Event()).set()
            seconds[task.asked.stem] += time.monotonic() - began

    # Sphinx would evaluate them one after the other.
    waiting = [one.stem for one in asked if not evaluated.is_kept(chapter_name(one.stem))]
    with ThreadPoolExecutor(build.jobs) as pool:
        try:
            futures = [pool.submit(go, task) for task in shared]
            futures += [pool.submit(_evaluate_one, stem, build) for stem in waiting]
            for future in futures:
                future.result()
            # Through the pool as well, so that an interruption comes to this thread.
            for task in tasks:
                if task.alone:
                    pool.submit(go, task).result()
        except BaseException:
            build.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return dict(seconds)


def _evaluate_one(stem: str, build: Build) -> None:
    if not build.stopped:
        with Job(build.screen, f"{stem}: evaluating what is published") as job:
            _in_a_process(evaluate, chapter_name(stem), build=build, progress=None)
            job.interrupted = build.stopped


def _measure_one(task: Task, build: Build) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvbook-") as scratch,
        Job(build.screen, f"{task.asked.stem}: measuring {task.experiment}") as job,
    ):
        job.progress_file = Path(scratch) / "progress"
        _in_a_process(run, task, build=build, progress=job.progress_file)
        job.interrupted = build.stopped


def _in_a_process(function: Callable[[Any], Any], argument: Any, build: Build, progress: Path | None) -> Any:
    """Call a function in a process of its own and give its result; None when it failed or was ended."""
    context: BaseContext = multiprocessing.get_context("spawn")
    if build.forks:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([kernel.PRELOADED])
    settings = dict(kernel.QUIET)
    if progress is not None:
        settings[PROGRESS_VARIABLE] = str(progress)
    if build.threads is not None:
        settings[THREADS_VARIABLE] = str(build.threads)
    ours, theirs = context.Pipe(duplex=False)
    target = f"{__name__}:{function.__name__}"
    process = context.Process(
        target=child.answer, args=(target, json.dumps(argument), {**os.environ, **settings}, theirs)
    )
    with ours:
        process.start()
        theirs.close()
        build.processes.add(process)
        # A process that was begun while everything was being stopped.
        if build.stopped:
            process.kill()
        result = None
        with contextlib.suppress(EOFError):
            result = ours.recv()
        process.join()
    build.processes.discard(process)
    return result


def _task(fields: list[Any]) -> Task:
    """Make a task again of what JSON has kept of it."""
    asked, experiment, alone, after = fields
    return Task(Asked(*asked), experiment, alone, tuple(after))


def missing(asked: list[list[Any]]) -> list[Task]:
    """List the experiments that have not been measured with what is asked for, in a process of their own."""
    tasks = []
    for one in (Asked(*fields) for fields in asked):
        for experiment in importlib.import_module(one.module).EXPERIMENTS:
            with contextlib.suppress(UserError):
                # Whether what comes after another one has anything to measure is known when that one is done.
                if experiment.after or not experiment.is_made(experiment.settings.checked(**one.values)):
                    tasks.append(Task(one, experiment.name, experiment.needs_the_machine, experiment.after))
    return tasks


def evaluate(chapter: str) -> None:
    """Evaluate a chapter's published rows, and keep what they give for the pages."""
    evaluated.published(chapter)


def run(fields: list[Any]) -> None:
    """Measure one experiment, in a process of its own."""
    task = _task(fields)
    experiments = {experiment.name: experiment for experiment in importlib.import_module(task.asked.module).EXPERIMENTS}
    experiment = experiments[task.experiment]
    experiment.run(experiment.settings.checked(**task.asked.values))
