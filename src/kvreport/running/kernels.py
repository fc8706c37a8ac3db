"""One build of the book: where it says how far it is, how much runs side by side, its kernels, and how all is ended.

A kernel executes one chapter after the other: what all chapters import takes longer than most of their cells.
Between two chapters a kernel forgets every name.  Modules stay, and so do the models that experiments share.  A kernel
serves no chapter that comes after an edit of what it has read: the packages' source, or data.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync

from kvbook import fingerprint, paths
from kvbook.diagnosis import cores
from kvbook.runs.threads import THREADS_VARIABLE
from kvreport.running.screen import Screen

# A kernel's command line, with Jupyter's place for the connection file.  The log level keeps remarks, as on slow
# shutdown, from among the progress lines.
_COMMAND = [
    sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--IPKernelApp.log_level=50",
    "--IPKernelApp.exec_lines=__import__('kvbook.garbage').garbage.look_less_often()",
]
# Lets the C library ask for large pages (glibc 2.35 and later): a tenth less time in four experiments that were tried.
# Their rows were bitwise identical; in another one a peak of memory moved by half a per cent.
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class _Kernel(AsyncKernelManager):
    """A kernel of this interpreter, whatever kernelspec named python3 is installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=_COMMAND, display_name="Python 3", language="python")


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
        self.threads = max(1, cores.as_torch_counts() // jobs) if jobs > 1 else None
        # Whether kernels measure time too, which is measured on the pages that users have.
        self.timing = self.stopped = False
        self._processes: list[Any] = []
        # By thread: an event loop goes with each.
        self._idle: dict[int, tuple[_Kernel, Any]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What a process of this build finds in its environment."""
        # Every refresh of a library's own bar would be stored as an output of a cell. torch's profiler notes each start
        # and stop.
        quiet = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "KINETO_LOG_LEVEL": "6"}
        return quiet if self.threads is None else quiet | {THREADS_VARIABLE: str(self.threads)}

    @contextlib.contextmanager
    def kernel(self, environment: Mapping[str, str], folder: Path) -> Iterator[_Kernel]:
        """Lend a kernel that works in a folder, with these variables and no names; one that fails is not lent again."""
        kernel, read = self._idle.pop(threading.get_ident(), (None, None))
        # Compared after the chapter's digest was taken: what is edited later only makes its copy stale.
        if kernel and read != _read_by_kernels():
            _end(kernel)
            kernel = None
        if kernel is None:
            name = f"{tempfile.gettempdir()}/kvbook-{os.urandom(8).hex()}.json"
            # A port may be taken before the kernel has begun, a file is its own; sockets' names are 103 bytes at most.
            way = "ipc" if os.name == "posix" and len(os.fsencode(name)) <= 100 else "tcp"
            kernel, read = _Kernel(transport=way, connection_file=name), _read_by_kernels()
            known = os.environ if self.timing else {**_LARGE_PAGES, **os.environ}
            run_sync(kernel.start_kernel)(env={**known, **environment}, cwd=str(folder))
            self._processes.append(kernel.provisioner.process)
            # One that was begun while everything was being stopped.
            if self.stopped:
                self.stop()
        try:
            run_sync(_begin_anew)(kernel, environment)
            yield kernel
        except BaseException:
            _end(kernel)
            raise
        self._idle[threading.get_ident()] = kernel, read

    def close(self) -> None:
        """End the kernels that wait for another chapter."""
        for kernel, _ in self._idle.values():
            _end(kernel)

    def stop(self) -> None:
        """End everything at once."""
        self.stopped = True
        for process in list(self._processes):
            # It may have ended at this very moment.
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _end(kernel: _Kernel) -> None:
    """End a kernel at once: everything is here, and taking its modules apart would take a second or two."""
    run_sync(kernel.shutdown_kernel)(now=True)


def _read_by_kernels() -> set[tuple[str, int, int]]:
    """List what a kernel may have read and kept."""
    folders = [*fingerprint.PACKAGES.values(), paths.DATA]
    files = [file for folder in folders for file in Path(folder).rglob("*") if file.suffix != ".pyc" and file.is_file()]
    return {(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files}


async def _begin_anew(kernel: _Kernel, environment: Mapping[str, str]) -> None:
    """Let a kernel forget all names, and take these variables."""
    client = kernel.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=60)
        code = f"import os; os.environ.update({dict(environment)!r}); get_ipython().reset(new_session=True)"
        await client.execute_interactive(code, silent=True, store_history=False)
    finally:
        client.stop_channels()
