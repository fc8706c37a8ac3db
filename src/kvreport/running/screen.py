"""What runs now and how far it is: on a terminal one line in place, in a log a line now and then."""

import shutil
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 5.0
SECONDS_WITHOUT_NEWS = 20.0


class Screen:
    """Where several jobs that run side by side say how far they are.

    Parameters
    ----------
    out
        A terminal or a log; standard error when left out.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._lock = threading.Lock()
        self._now: dict[Job, str] = {}

    def line(self, text: str) -> None:
        """Say something once, above what is in place."""
        with self._lock:
            if self._out.isatty():
                self._out.write("\r\x1b[K")
            self._out.write(f"{text}\n")
            self._draw()

    def show(self, job: "Job", status: str) -> None:
        """Put a job's status in place, on a terminal; a log has no place."""
        with self._lock:
            self._now[job] = status
            self._draw()

    def forget(self, job: "Job") -> None:
        """Take a job's status away."""
        with self._lock:
            self._now.pop(job, None)
            self._draw()

    @property
    def has_places(self) -> bool:
        """Whether a line can be written over."""
        return self._out.isatty()

    def _draw(self) -> None:
        if self._out.isatty():
            # A share of the width each, so that the second job is not pushed out of sight by the first.
            room = max(10, (shutil.get_terminal_size().columns - 1) // max(1, len(self._now)) - 3)
            self._out.write("\r\x1b[K" + "   ".join(status[:room] for status in self._now.values()))
        self._out.flush()


class Job:
    """One of them; a context that says when it begins, how far it is, and how it ended.

    Parameters
    ----------
    screen
        Where to say it.
    head
        What it is called, such as ``"chapter 1 of 3: 06_layer_drift"``.
    why
        Why it must run, for the first line.
    steps
        How many cells it has; 0 for what has none.
    """

    def __init__(self, screen: Screen, head: str, why: str | None = None, steps: int = 0) -> None:
        self._screen, self._head, self._steps = screen, head, steps
        self._why = f" ({why})" if why else ""
        self._step = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.interrupted = False
        self.progress_file: Path | None = None

    def next_step(self) -> None:
        """Note that the next cell begins."""
        self._step += 1

    def __enter__(self) -> "Job":
        self._began = time.monotonic()
        self._screen.line(f"{self._head}{self._why}")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        self._screen.forget(self)
        interrupted = self.interrupted or (kind is not None and issubclass(kind, KeyboardInterrupt))
        end = "interrupted" if interrupted else "done" if kind is None else "failed"
        self._screen.line(f"{self._head}: {end} after {self._elapsed()}")

    def _watch(self) -> None:
        last_news, last_said = "", self._began
        while not self._done.wait(SECONDS_BETWEEN_LOOKS):
            news, now = self._news(), time.monotonic()
            line = f"{self._head}  {self._elapsed()}  {news}"
            if self._screen.has_places:
                self._screen.show(self, line)
                last_news = news
                continue
            pause = SECONDS_BETWEEN_LINES if news != last_news else SECONDS_WITHOUT_NEWS
            if now - last_said >= pause:
                self._screen.line(line)
                last_news, last_said = news, now

    def _news(self) -> str:
        news = f"cell {self._step} of {self._steps}" if self._steps else ""
        if self.progress_file is not None and self.progress_file.is_file():
            reported = self.progress_file.read_text("utf-8", errors="replace").strip()
            news += f"  {reported}" if reported else ""
        return news.strip()

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        return f"{minutes}:{seconds:02d}"
