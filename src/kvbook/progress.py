"""How far a long job is, said where its user looks and never in a notebook's outputs.

Three places, the first that applies:

- ``KVBOOK_PROGRESS`` names a file: its one line is kept up to date, and whoever runs the chapter shows it
  (:mod:`kvreport.running.execution` does);
- a terminal: a tqdm bar;
- anything else (a log, or a kernel that plain papermill started): a line every few seconds on the true
  standard error. In a kernel that is the terminal of whoever started it, not the cell's output.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Names the file whose one line says what is running.
PROGRESS_VARIABLE = "KVBOOK_PROGRESS"

# A line in a log every so often: never a silent minute, and never a flood.
SECONDS_BETWEEN_LINES = 5.0
# The file is read about once a second; writing it for each of 10,000 fast samples would cost more than they
# do.
SECONDS_BETWEEN_WRITES = 0.2

# The loops that are under way, outermost first: "model 1/2 · sample 40/100".
_running: list[str] = []


def track(iterable: Iterable[T], total: int | None = None, label: str = "") -> Iterator[T]:
    """Iterate while saying how far."""
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    if PROGRESS_VARIABLE not in os.environ and sys.stderr.isatty():
        from tqdm import tqdm

        # An explicit `disable`: TQDM_DISABLE silences other libraries' bars, and this one is ours.
        yield from tqdm(iterable, total=total, desc=label, file=sys.stderr, leave=False, disable=False)
        return
    level, last = len(_running), float("-inf")
    _running.append("")
    try:
        for done, item in enumerate(iterable):
            _running[level] = f"{label} {done}" if total is None else f"{label} {done}/{total}"
            last = _say_if_due(last)
            yield item
    finally:
        del _running[level:]
        if PROGRESS_VARIABLE in os.environ:
            _say(" · ".join(_running))


class TimeLeft:
    """The time left of work of a known amount that is done in pieces of different size.

    Parameters
    ----------
    total : float
        Amount of work, in any unit.
    label : str
        What is done.
    """

    def __init__(self, total: float, label: str) -> None:
        self.total, self.done, self.label = total, 0.0, label
        self._start = self._last = time.monotonic()

    def line(self, seconds: float) -> str:
        """Say how much is done after so many seconds, and how long the rest will take at this pace."""
        share = min(1.0, self.done / self.total) if self.total else 1.0
        if not share:
            return self.label
        return f"{self.label}: {share:.0%}, about {seconds / share - seconds:.0f} s left"

    def advance(self, amount: float) -> None:
        """Count a piece as done, and say so every few seconds."""
        self.done += amount
        self._last = _say_if_due(self._last, lambda seconds: self.line(seconds - self._start))


def note(line: str) -> None:
    """Tell whoever started this process something that is no part of its output."""
    print(f"kvbook: {line}", file=sys.stderr, flush=True)


@contextmanager
def headed(text: str) -> Iterator[None]:
    """Say something now, and in front of every line that says how far, while this is open."""
    _say(text)
    _running.append(text)
    try:
        yield
    finally:
        _running.pop()


def _say_if_due(last: float, line: Callable[[float], str] | None = None) -> float:
    """Say how far everything is, unless that was said just now; return when it was said last."""
    now = time.monotonic()
    if now - last < (SECONDS_BETWEEN_WRITES if PROGRESS_VARIABLE in os.environ else SECONDS_BETWEEN_LINES):
        return last
    _say(" · ".join([*_running, line(now)] if line else _running))
    return now


def _say(line: str) -> None:
    if path := os.environ.get(PROGRESS_VARIABLE):
        # A reader may meet a half-written line for an instant; it only ever shows it, so that is fine.
        Path(path).write_text(line, encoding="utf-8")
        return
    # Without a real standard error (a captured or closed stream) there is nobody to tell.
    with suppress(OSError, ValueError):
        # ipykernel replaces sys.stderr by a stream into the notebook, but its descriptor is the real one.
        os.write(sys.stderr.fileno(), f"{line}\n".encode())
