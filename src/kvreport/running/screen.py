"""What runs now and how far it is: on a terminal one line in place, in a log a line now and then."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 5.0
SECONDS_WITHOUT_NEWS = 20.0


class Job:
    """Something that runs: what it is called, and how far it is."""

    def __init__(self, head: str) -> None:
        self.head = head
        # What is said of it, and a file whose line is said after that.
        self.said = ""
        self.progress_file: Path | None = None
        self.interrupted = False
        self._began = time.monotonic()

    def news(self) -> str:
        """Say how far it is."""
        file = self.progress_file
        reported = file.read_text("utf-8", errors="replace") if file is not None and file.is_file() else ""
        return f"{self.said}  {reported}".strip()

    def elapsed(self) -> str:
        """Say for how long it runs."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        return f"{minutes}:{seconds:02d}"

    def line(self) -> str:
        """Say all of it."""
        return f"{self.head}  {self.elapsed()}  {self.news()}"


class Screen:
    """Where jobs that run side by side say how far they are: a terminal or a log; standard error when left out."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._lock = threading.Lock()
        self._jobs: list[Job] = []

    @contextlib.contextmanager
    def job(self, head: str, why: str | None = None) -> Iterator[Job]:
        """Say that a job begins and why, while it runs how far it is, and how it ended."""
        job, ended = Job(head), threading.Event()
        self._say(f"{head} ({why})" if why else head)
        self._jobs.append(job)
        watch = threading.Thread(target=self._watch, args=(job, ended), daemon=True)
        watch.start()
        end = "failed"
        try:
            yield job
            end = "done"
        except KeyboardInterrupt:
            job.interrupted = True
            raise
        finally:
            ended.set()
            watch.join()
            self._jobs.remove(job)
            self._say(f"{head}: {'interrupted' if job.interrupted else end} after {job.elapsed()}")

    def _say(self, line: str = "") -> None:
        """Write a line; on a terminal put below it, or in its place, how far everything is."""
        with self._lock:
            if self._out.isatty():
                # A share of the width each, so that the second job is not pushed out of sight by the first.
                room = max(10, (shutil.get_terminal_size().columns - 1) // max(1, len(self._jobs)) - 3)
                line = f"\r\x1b[K{line}" + "\n" * bool(line)
                line += "\r\x1b[K" + "   ".join(job.line()[:room] for job in self._jobs)
            else:
                line += "\n"
            self._out.write(line)
            self._out.flush()

    def _watch(self, job: Job, ended: threading.Event) -> None:
        news, said = "", time.monotonic()
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            if self._out.isatty():
                self._say()
            elif time.monotonic() - said >= (SECONDS_BETWEEN_LINES if job.news() != news else SECONDS_WITHOUT_NEWS):
                news, said = job.news(), time.monotonic()
                self._say(job.line())
