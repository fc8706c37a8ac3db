"""One build of the book: where it says how far it is, how much runs side by side, and how all of it is ended."""

import contextlib
import os
from typing import Any, TextIO

from kvreport.running.screen import Screen


class Build:
    """What everything that runs side by side shares.

    Parameters
    ----------
    out
        Where progress is written; standard error when None.
    jobs
        How many experiments, and then how many chapters, run at a time.
    forks
        Whether their processes are forked from one that has imported the libraries.
    """

    def __init__(self, out: TextIO | None, jobs: int, forks: bool = False) -> None:
        self.screen = Screen(out)
        self.jobs = jobs
        # How many threads an experiment may use that measures no time; all where None.
        self.threads = max(1, cores() // jobs) if jobs > 1 else None
        self.forks = forks
        self.stopped = False
        # Whatever has a `kill`: processes, and what Jupyter takes for one.
        self.processes: set[Any] = set()

    def stop(self) -> None:
        """End everything at once."""
        self.stopped = True
        for process in list(self.processes):
            # It may end, or never have begun, at this very moment.
            with contextlib.suppress(ProcessLookupError, AttributeError, ValueError):
                process.kill()


def cores() -> int:
    """Count the cores as torch counts its threads: what the user has set, else those that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
