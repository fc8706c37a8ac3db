"""One build of the book: where it says how far it is, how much runs side by side, and how all of it is ended."""

import contextlib
import os
from typing import Any, TextIO

from kvbook.diagnosis.cores import usable
from kvbook.runs.threads import THREADS_VARIABLE
from kvreport.running.screen import Screen


class Build:
    """What everything that runs side by side shares.

    Parameters
    ----------
    out
        Where progress is written; standard error when None.
    jobs
        How many chapters run at a time.
    """

    def __init__(self, out: TextIO | None, jobs: int) -> None:
        self.screen = Screen(out)
        # How many threads an experiment may use that measures no time; all where None.
        self.threads = max(1, cores() // jobs) if jobs > 1 else None
        self.stopped = False
        self._processes: list[Any] = []

    @property
    def environment(self) -> dict[str, str]:
        """What a process of this build finds in its environment."""
        # Every refresh of a library's own bar would be stored as an output of a cell. torch's profiler notes each start
        # and stop.
        quiet = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "KINETO_LOG_LEVEL": "6"}
        return quiet if self.threads is None else quiet | {THREADS_VARIABLE: str(self.threads)}

    def begun(self, process: Any) -> None:
        """Note a process, which is to end with the build."""
        self._processes.append(process)
        # One that was begun while everything was being stopped.
        if self.stopped:
            self.stop()

    def stop(self) -> None:
        """End everything at once."""
        self.stopped = True
        for process in list(self._processes):
            # It may have ended at this very moment.
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def cores() -> int:
    """Count the cores as torch counts its threads: what the user has set, else those that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    return usable()
