"""Running the atlas: one forked process per architecture, with limits on memory and time, and rows kept as they come."""

import json
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbook.atlas import columns, configurations
from kvbook.errors import UserError

# Beyond what the parent holds: a configuration that was not shrunk must not take the machine's memory.
_MEMORY = 6 * 2**30
SECONDS = 180


def versions() -> dict[str, str]:
    """Give the versions that every row depends on."""
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """Read the rows that are there already, by architecture.

    Raises
    ------
    UserError
        When the file holds rows of other versions, or is no such file.
    """
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
        if {key: row.get(key) for key in versions()} != versions():
            raise UserError(f"{path} holds rows of transformers {row.get('transformers')}: name another file")
        found[row["architecture"]] = row
    return found


def _child(name: str, threads: int, pipe: Connection) -> None:
    """Measure one architecture in a process of its own, whatever becomes of it."""
    with Path(os.devnull).open("w") as nowhere:
        # Classes warn of missing kernels and of odd settings, once for each of hundreds of models.
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY, held + _MEMORY))
    torch.set_num_threads(threads)
    try:
        row = columns.measure(name)
    except BaseException as error:
        row = {"status": "fails", "reason": columns.first_line(error)}
    pipe.send(row)
    pipe.close()


@dataclass
class _Running:
    name: str
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    until: float


def _row(name: str, **found: Any) -> dict[str, Any]:
    return {"architecture": name, "class": configurations.class_of(name)} | found | versions()


def run(names: list[str], path: Path, workers: int = 2, seconds: int = SECONDS) -> Iterator[dict[str, Any]]:
    """Measure architectures, each in a forked process, and append their rows to a file.

    Parameters
    ----------
    names : list of str
        Model types; those that the file holds already are left out.
    path : Path
        Of JSON lines.
    workers : int
        Processes at a time, of one thread each.
    seconds : int
        After which a process is ended and its architecture listed as too slow.

    Yields
    ------
    dict
        A row, as soon as it is measured.

    Raises
    ------
    UserError
        When the file cannot be continued.
    """
    done = finished(path)
    waiting = [name for name in names if name not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    running: dict[Connection, _Running] = {}
    # A fork must not happen while threads compute.
    torch.set_num_threads(1)
    with path.open("a") as file, warnings.catch_warnings():
        # Python warns of forking with threads, of which none computes here.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            # The half line of a run that was killed must not take the next row with it.
            file.write("\n")
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(name, 1, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = _Running(name, process, ours, time.monotonic() + seconds)
            for row in _ended(running):
                file.write(json.dumps(row) + "\n")
                file.flush()
                yield row


def _ended(running: dict[Connection, _Running]) -> Iterator[dict[str, Any]]:
    """Wait a moment, and give the rows of the processes that ended or ran out of time."""
    ready = wait(list(running), timeout=0.5)
    for pipe, each in list(running.items()):
        if pipe in ready:
            try:
                row = _row(each.name, **pipe.recv())
            except EOFError:
                each.process.join()
                row = _row(each.name, status="fails", reason=f"the process ended with {each.process.exitcode}")
        elif time.monotonic() > each.until:
            each.process.kill()
            row = _row(each.name, status="fails", reason="took longer than allowed")
        else:
            continue
        each.process.join()
        pipe.close()
        del running[pipe]
        yield row
