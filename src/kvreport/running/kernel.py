"""The process that executes a chapter: IPython's kernel, whose garbage collector passes over what the first cell imports.

torch and transformers bring very many objects that live as long as the process.  Looking through them again and again while
they are imported, whenever enough is new, and once more at the end takes long and finds nothing.

Where many chapters are executed, their kernels are forked from one process that has imported the libraries
(`kvreport.running.fork_imports`), which each of them would do for itself otherwise.
"""

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TextIO

# Every refresh of a library's own bar would be stored as an output of the cell. torch's profiler notes each start and stop.
QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "KINETO_LOG_LEVEL": "6"}

_MODULE = "kvreport.running.kernel"
PRELOADED = "kvreport.running.fork_imports"


def command() -> list[str]:
    """Give the command line of a kernel, with Jupyter's place for the connection file."""
    # The log level keeps remarks on local TCP and on slow shutdown from among the progress lines.
    return [sys.executable, "-m", _MODULE, "-f", "{connection_file}", "--IPKernelApp.log_level=50"]


def start() -> None:
    """Start the kernel on the command line's connection file; collect garbage from the end of the first cell on."""
    from ipykernel.kernelapp import IPKernelApp

    gc.disable()
    app, errors = IPKernelApp.instance(), sys.stderr
    app.initialize()
    _log_to(sys.stderr, instead_of=errors)
    events = app.shell.events

    def collect_from_here(*_: Any) -> None:
        events.unregister("post_run_cell", collect_from_here)
        gc.freeze()
        gc.enable()

    events.register("post_run_cell", collect_from_here)
    app.start()


class Forked:
    """A kernel forked from the process that has imported the libraries, with what Jupyter asks of a `subprocess.Popen`.

    Parameters
    ----------
    arguments : sequence of str
        `command`, its place for the connection file filled.
    environment : mapping
        The kernel's whole environment.
    folder : str
        Where it works.
    """

    # As of a process without pipes.
    stdin = stdout = stderr = None

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        place = arguments.index(_MODULE) + 1
        self._process = context.Process(target=_become, args=(arguments[place:], dict(environment), folder))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Give the exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and give the exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(_MODULE, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _become(arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Turn the forked process into a kernel that differs from one of its own start in nothing but what is imported."""
    # Else the kernel's own processes and locks would be made in the way this one was.
    multiprocessing.set_start_method(None, force=True)
    # A group of its own, to which Jupyter sends its signals.
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[1:] = arguments
    # A kernel would look for the parent that this names: one of the book's own, if it is built from within Jupyter.
    os.environ.pop("JPY_PARENT_PID", None)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process().sentinel,), daemon=True).start()
    start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _log_to(stream: TextIO, instead_of: TextIO) -> None:
    """Have libraries that are imported already log into the notebook, as they would if a cell had imported them."""
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is instead_of:
                handler.setStream(stream)


if __name__ == "__main__":
    # As ipykernel's own launcher does: a notebook's folder must not hide a library. IPython adds it back later.
    if Path(sys.path[0]) == Path.cwd():
        del sys.path[0]
    start()
