"""Running the atlas: one forked process per architecture, with limits on memory and time, and rows kept as they come.

On a GPU the processes are forked from a server that has imported everything and touched no device, since a process that
has cannot be forked.
"""

import functools
import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbook import UserError
from kvbook.atlas import columns, configurations

# Beyond what the parent holds: a configuration that was not shrunk must not take the machine's memory.
_MEMORY = 6 * 2**30
SECONDS = 180

Rows = Iterator[dict[str, Any]]
Measure = Callable[[str, str], dict[str, Any]]


def versions() -> dict[str, str]:
    """Name the versions that every row depends on."""
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def finished(path: Path, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Read the rows that are there already, by architecture."""
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            # The last line of a run that was killed while it wrote.
            continue
        if not isinstance(row, dict) or "architecture" not in row:
            raise UserError(f"{path} does not hold rows of the atlas: name another file")
        if not versions().items() <= row.items():
            raise UserError(f"{path} holds rows of transformers {row.get('transformers')}: name another file")
        if row.get("device", "cpu") != device:
            raise UserError(f"{path} holds rows of device {row['device']}: name another file")
        found[row["architecture"]] = row
    return found


def _child(measure: Measure, name: str, device: str, seconds: int, pipe: Connection) -> None:
    """Measure one architecture in a process of its own, which ends by itself when its time is over."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    # Missing from systems on which no process is forked.
    import resource

    with Path(os.devnull).open("w") as nowhere:
        # Classes warn of missing kernels and of odd settings, once for each of hundreds of models.
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if device == "cpu":
        # A GPU's driver reserves addresses by the hundreds of GiB.
        resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY, held + _MEMORY))
    torch.set_num_threads(1)
    try:
        row = measure(name, device)
    except BaseException as error:
        row = {"status": "fails", "reason": columns.in_one_line(error)}
    pipe.send(row)
    pipe.close()


def _measure(paths_only: bool) -> Measure:
    if paths_only:
        return functools.partial(columns.measure, quick=True)
    # Another release may lack what row-invariant arithmetic changes.
    from kvbook.atlas import invariance

    return invariance.measure


def _context(device: str) -> multiprocessing.context.BaseContext:
    if not hasattr(os, "fork"):
        raise UserError("the atlas measures each architecture in a forked process, which this system does not have")
    if device == "cpu":
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def measured(
    names: Iterable[str], workers: int = 2, seconds: int = SECONDS, device: str = "cpu", paths_only: bool = False
) -> Rows:
    """Measure architectures, each in a process of its own and of one thread; yield each row as soon as it is there."""
    waiting, context, measure = list(names), _context(device), _measure(paths_only)
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    # A fork must not happen while threads compute.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # Python warns of forking with threads, of which none computes here.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
            while waiting or running:
                while waiting and len(running) < workers:
                    name = waiting.pop(0)
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(target=_child, args=(measure, name, device, seconds, theirs), daemon=True)
                    process.start()
                    theirs.close()
                    running[ours] = name, process
                for pipe in wait(list(running)):
                    yield _row(pipe, *running.pop(pipe))
    finally:
        for _, process in running.values():
            process.kill()
        torch.set_num_threads(threads)


def _row(pipe: Connection, name: str, process: BaseProcess) -> dict[str, Any]:
    """Read the row that a process sent, or say how it ended without one."""
    try:
        found = pipe.recv()
    except EOFError:
        process.join()
        late = process.exitcode == -signal.SIGALRM
        why = "took longer than allowed" if late else f"the process ended with {process.exitcode}"
        found = {"status": "fails", "reason": why}
    process.join()
    pipe.close()
    return {"architecture": name, "class": configurations.class_of(name)} | found | versions()


def run(names: list[str], path: Path, device: str = "cpu", **how: Any) -> Rows:
    """Measure architectures, each in a forked process as `measured` does, and append their rows to a file."""
    done = finished(path, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            # The half line of a run that was killed must not take the next row with it.
            file.write("\n")
        for row in measured([name for name in names if name not in done], device=device, **how):
            file.write(json.dumps(row | {"device": device}) + "\n")
            file.flush()
            yield row
