"""Experiments that need the machine to themselves, measured one after the other before the chapters are executed.

One process measures them, and the notebooks find their runs.  What fails is left to its notebook, which shows how far
it came.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbook import progress
from kvreport.publishing import found
from kvreport.running.planning import Chapter

if TYPE_CHECKING:
    from kvreport.running.kernels import Build


def measure(chapters: Iterable[Chapter], build: "Build") -> tuple[dict[str, float], bool]:
    """Measure what needs the machine; return the seconds by chapter, and whether all of it succeeded."""
    asked = [
        (chapter.stem, chapter.package, chapter.values(), chapter.left_out)
        for chapter in chapters if chapter.about.alone
    ]
    return measure_asked(asked, build) if asked else ({}, True)


def measure_asked(
    asked: list[tuple[str, str, dict[str, Any], list[str]]], build: "Build"
) -> tuple[dict[str, float], bool]:
    """Measure what chapters ask for by their stems, packages and parameters, but for what they leave out."""
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


if __name__ == "__main__":
    sys.exit(min(1, _main(json.loads(sys.argv[1]), Path(sys.argv[2]))))
