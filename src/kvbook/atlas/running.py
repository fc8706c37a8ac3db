"""Running the atlas: one forked process per architecture, with limits on memory and time, and rows kept as they come.

On a GPU the processes are forked from a server that has imported everything and touched no device, since a process that
has cannot be forked.
"""

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterable, Iterator
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
        if {key: row.get(key) for key in versions()} != versions():
            raise UserError(f"{path} holds rows of transformers {row.get('transformers')}: name another file")
        if row.get("device", "cpu") != device:
            raise UserError(f"{path} holds rows of device {row['device']}: name another file")
        found[row["architecture"]] = row
    return found


def _child(name: str, device: str, pipe: Connection) -> None:
    """Measure one architecture in a process of its own, whatever becomes of it."""
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
        row = columns.measure(name, device)
    except BaseException as error:
        row = {"status": "fails", "reason": columns.in_one_line(error)}
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


def _context(device: str) -> multiprocessing.context.BaseContext:
    if not hasattr(os, "fork"):
        raise UserError("the atlas measures each architecture in a forked process, which this system does not have")
    if device == "cpu":
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def measured(
    names: Iterable[str], workers: int = 2, seconds: int = SECONDS, device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """Measure architectures, each in a process of its own and of one thread; give each row as soon as it is there."""
    waiting = list(names)
    context = _context(device)
    running: dict[Connection, _Running] = {}
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
                    process = context.Process(target=_child, args=(name, device, theirs), daemon=True)
                    process.start()
                    theirs.close()
                    running[ours] = _Running(name, process, ours, time.monotonic() + seconds)
                yield from _ended(running)
    finally:
        for each in running.values():
            each.process.kill()
        torch.set_num_threads(threads)


def run(
    names: list[str], path: Path, workers: int = 2, seconds: int = SECONDS, device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """Measure architectures, each in a forked process, and append their rows to a file."""
    done = finished(path, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            # The half line of a run that was killed must not take the next row with it.
            file.write("\n")
        for row in measured([name for name in names if name not in done], workers, seconds, device):
            file.write(json.dumps(row | {"device": device}) + "\n")
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
