"""Running a sweep's cells on the workers of a Dask cluster: this machine's own, one that is there, or one on Slurm.

A cell is a call of its experiment, whose run has a folder named by what makes it.  So nothing here keeps count of what is
done: a cell that was finished is found, one that was begun goes on behind its last whole unit, and two workers that get the
same cell never work on it at once.  When a worker is lost, the scheduler gives its cell to another.

Workers whose ``_build`` is another folder keep their runs there, and a copy is fetched from them.

Dask pickles what it sends between scheduler, workers and client.  The clusters that are started here talk TLS with
certificates of their own, so that nobody else on the machine or the network can send them anything.
"""

import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from kvbook import paths, progress
from kvbook.errors import UserError
from kvbook.runs import records
from kvreport.running import catalogue
from kvreport.running.sweeps import Cell

# How often a cell whose worker was lost goes to another one, before the cell is taken for the cause.
_LOST_WORKERS = 3
# How often a cell that failed for another reason than its settings is tried again.
_RETRIES = 1
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_TO_CONNECT = 15
# Each worker imports torch before it is there.
_SECONDS_TO_START = 300
_MISSING = "a sweep needs Dask Distributed: pip install -e 'src/kvreport[cluster]'"


@dataclass
class Outcome:
    """What came of a sweep.

    Attributes
    ----------
    folders : dict
        Folder of each finished cell's run, by its label; None for a cell with nothing to measure.
    made : int
        How many of them were made now; the others had been made before.
    failures : dict
        One line for each cell that failed, by its label.
    lost_workers : int
        How many workers were lost meanwhile.
    """

    folders: dict[str, Path | None] = field(default_factory=dict)
    made: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    lost_workers: int = 0

    def text(self) -> str:
        """Say it in a few lines."""
        lines = [f"failed: {label}: {why}" for label, why in self.failures.items()]
        found = len(self.folders) - self.made
        lost = f"; {self.lost_workers} workers were lost on the way" if self.lost_workers else ""
        lines.append(
            f"{len(self.folders)} cells are finished in {paths.RUNS} ({self.made} made now, {found} found), "
            f"{len(self.failures)} failed{lost}"
        )
        return "\n".join(lines)


def _require_dask() -> None:
    for name in ("distributed", "cryptography"):
        if importlib.util.find_spec(name) is None:
            raise UserError(_MISSING)


def compute(experiment: str, settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Run a cell; this is what a worker does."""
    if Cell("", experiment, dict(settings)).source != source:
        return {"error": "the worker has another version of kvbook: install one and the same everywhere"}
    try:
        run = catalogue.run(experiment, settings)
    except UserError as error:
        # Not raised: settings that cannot be run cannot be run on another worker either.
        return {"error": str(error)}
    return {"folder": str(run.folder) if run else None, "made": bool(run and run.made)}


def contents(folder: str) -> dict[str, bytes]:
    """Read a run's files, to send them; called on the worker that holds them."""
    return {name: (Path(folder) / name).read_bytes() for name in ("rows.csv", "run.json")}


def _keep(experiment: str, name: str, files: Mapping[str, bytes]) -> Path:
    """Write a run that came from another machine, as atomically as one of our own."""
    # Names that come over the network are not trusted to stay in the folder.
    if not re.fullmatch(r"[0-9a-f]{16}", name):
        raise UserError(f"a worker sent a run called {name!r}: is it one of yours?")
    final = paths.RUNS / experiment / name
    with records.writable(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        with records.alone(final.with_name(f".{name}.lock"), f"fetches {experiment}/{name}"):
            if not final.is_dir():
                staged = final.with_name(f".{name}.fetched")
                shutil.rmtree(staged, ignore_errors=True)
                staged.mkdir()
                for file in ("rows.csv", "run.json"):
                    (staged / file).write_bytes(files[file])
                records.load(staged)
                staged.rename(final)
    return final


@contextmanager
def local(n_workers: int, threads: int, gpus: int = 0) -> Iterator[Any]:
    """Start workers on this machine, each a process with a number of CPU threads, and GPUs of its own if any."""
    _require_dask()
    import dask
    from distributed import Client, Nanny, Scheduler, SpecCluster
    from distributed.security import Security

    security = Security.temporary()
    with tempfile.TemporaryDirectory(prefix="kvbook-sweep-") as scratch, dask.config.set(_configuration()):
        common = {"host": "127.0.0.1", "protocol": "tls", "security": security}
        scheduler = {"cls": Scheduler, "options": {**common, "dashboard": False, "port": 0}}
        workers = {
            index: {
                "cls": Nanny,
                "options": {
                    **common,
                    "nthreads": 1,
                    "memory_limit": 0,
                    "dashboard": False,
                    "local_directory": scratch,
                    "resources": {"GPU": 1} if gpus else {},
                    "env": _environment(Path(scratch), index, threads, gpus),
                    "silence_logs": logging.CRITICAL,
                    "preload": ["from kvbook import garbage; garbage.look_less_often()"],
                },
            }
            for index in range(n_workers)
        }
        with (
            SpecCluster(workers, scheduler, security=security, silence_logs=logging.CRITICAL) as cluster,
            Client(cluster, security=security) as client,
        ):
            client.kvbook_progress = Path(scratch)
            client.wait_for_workers(n_workers, timeout=_SECONDS_TO_START)
            yield client


def _environment(scratch: Path, index: int, threads: int, gpus: int) -> dict[str, str]:
    # Dask sets some of these to one itself, but only for what a worker imports after it has started.
    values = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    values[progress.PROGRESS_VARIABLE] = str(scratch / f"progress-{index}")
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range((index + 1) * gpus)]
        values["CUDA_VISIBLE_DEVICES"] = ",".join(names[index * gpus : (index + 1) * gpus])
    return values


def _configuration() -> dict[str, Any]:
    return {
        "distributed.scheduler.allowed-failures": _LOST_WORKERS,
        # A cell holds the interpreter for long; that is no reason to give its worker up.
        "distributed.scheduler.worker-ttl": None,
        "distributed.admin.log-format": "%(message)s",
        "distributed.logging.distributed": "critical",
    }


@contextmanager
def existing(address: str) -> Iterator[Any]:
    """Connect to a scheduler that is there; its workers must have this version of kvbook installed."""
    _require_dask()
    from distributed import Client

    try:
        client = Client(address, timeout=_SECONDS_TO_CONNECT)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"no scheduler answers at {address}: {type(error).__name__}") from None
    with client:
        yield client


@contextmanager
def on_slurm(options_file: Path, gpu: bool) -> Iterator[Any]:
    """Start workers as jobs of Slurm."""
    _require_dask()
    from distributed import Client
    from distributed.security import Security

    with tempfile.TemporaryDirectory(prefix="kvbook-certificates-", dir=Path.home()) as shared:
        security = Security.temporary()
        cluster, jobs = _slurm_cluster(options_file, gpu, security=security, shared_temp_directory=shared)
        with cluster, Client(cluster, security=security) as client:
            cluster.scale(jobs=jobs)
            yield client
        # dask-jobqueue leaves its copies of the certificates to the garbage collector, which would come when the folder is
        # gone, and complain.
        for copied in vars(cluster).values():
            if str(getattr(copied, "name", "")).startswith(shared):
                copied.close()


def slurm_script(options_file: Path, gpu: bool) -> str:
    """Write the script of a job as it would be submitted; nothing is."""
    _require_dask()
    cluster, jobs = _slurm_cluster(options_file, gpu)
    with cluster:
        return f"# {jobs} jobs of:\n{cluster.job_script()}"


def _slurm_cluster(options_file: Path, gpu: bool, **more: Any) -> tuple[Any, int]:
    if importlib.util.find_spec("dask_jobqueue") is None:
        raise UserError("jobs of Slurm need dask-jobqueue: pip install -e 'src/kvreport[cluster]'")
    from dask_jobqueue import SLURMCluster

    try:
        options = yaml.safe_load(options_file.read_text("utf-8"))
        jobs = int(options.pop("jobs"))
        # What a job prints; without a name for it Slurm litters the folder in which the sweep was started.
        options.setdefault("log_directory", str(paths.BUILD / "slurm"))
        # One cell at a time in a process: seeds and the number of threads are the process's.
        options |= {"job_cpu": options.get("cores", 1), "cores": 1, "processes": 1}
        if gpu:
            options["worker_extra_args"] = [*options.get("worker_extra_args", []), "--resources", "GPU=1"]
        return SLURMCluster(n_workers=0, silence_logs="critical", **options, **more), jobs
    except OSError as error:
        raise UserError(f"{options_file}: {error.strerror}: name a file of Slurm's options") from None
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{options_file} is not one of Slurm's options ({' '.join(str(error).split())})") from None


def sweep(
    cells: list[Cell],
    *,
    scheduler: str | None = None,
    slurm: Path | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus: int = 1,
) -> Outcome:
    """Run the cells of a sweep where it is asked for."""
    needs_gpu = any(cell.on_gpu for cell in cells)
    if scheduler:
        cluster = existing(scheduler)
    elif slurm:
        cluster = on_slurm(slurm, needs_gpu)
    elif needs_gpu:
        there = torch.cuda.device_count() // gpus
        if not there:
            raise UserError(
                f"{gpus} GPU a worker, and this machine has {torch.cuda.device_count()}: sweep device: [cpu]"
            )
        cluster = local(min(workers or there, there, len(cells)), threads, gpus)
    else:
        cluster = local(min(workers or max(1, (os.cpu_count() or 1) // threads), len(cells)), threads)
    try:
        with cluster as client:
            if scheduler and needs_gpu:
                _refuse_without_gpu(client, scheduler)
            return run(client, cells)
    except KeyboardInterrupt:
        raise UserError("interrupted; what was finished is kept, and the same sweep goes on from there") from None


def _refuse_without_gpu(client: Any, address: str) -> None:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    if not any(worker.get("resources", {}).get("GPU") for worker in workers):
        # Dask would wait for one, for ever and without a word.
        raise UserError(f"no worker at {address} declares a GPU: start them with `dask worker --resources GPU=1`")


def run(client: Any, cells: list[Cell]) -> Outcome:
    """Run the cells of a sweep, and say how far."""
    labels = {cell.key: cell for cell in cells}
    futures = {
        cell.key: client.submit(
            compute,
            cell.experiment,
            cell.settings,
            cell.source,
            key=cell.key,
            resources={"GPU": 1} if cell.on_gpu else None,
            retries=_RETRIES,
            # A cell is found by its folder; a result that some scheduler remembers may be of a folder that is gone.
            pure=False,
        )
        for cell in cells
    }
    outcome = Outcome()
    watch = _Watch(client, cells, outcome)
    while futures:
        for key in [key for key, future in futures.items() if future.done()]:
            _settle(client, labels[key], futures.pop(key), outcome)
        watch.say(left=futures)
        if futures:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    return outcome


def _settle(client: Any, cell: Cell, future: Any, outcome: Outcome) -> None:
    error = future.exception()
    if error is not None:
        lost = type(error).__name__ == "KilledWorker"
        why = f"{_LOST_WORKERS + 1} workers were lost on it" if lost else f"{type(error).__name__}: {error}"
        outcome.failures[cell.label] = " ".join(why.split())
        return
    result = future.result()
    if "error" in result:
        outcome.failures[cell.label] = result["error"]
        return
    outcome.made += result["made"]
    folder = Path(result["folder"]) if result["folder"] else None
    if folder and not any(folder.is_relative_to(ours) for ours in (paths.RUNS, paths.RECORDED_RUNS)):
        worker = next(iter(client.who_has([future])[future.key]))
        files = client.submit(contents, str(folder), workers=[worker], pure=False).result()
        folder = _keep(cell.experiment, folder.name, files)
    outcome.folders[cell.label] = folder


class _Watch:
    """Says what runs: in place on a terminal, else a line every few seconds."""

    def __init__(self, client: Any, cells: list[Cell], outcome: Outcome) -> None:
        self._client, self._cells, self._outcome = client, {cell.key: cell for cell in cells}, outcome
        self._workers: set[str] = set()
        self._last = ("", -_SECONDS_BETWEEN_LINES)

    def say(self, left: Mapping[str, Any]) -> None:
        workers = set(self._client.scheduler_info(n_workers=-1)["workers"])
        if gone := self._workers - workers:
            self._outcome.lost_workers += len(gone)
            self._write(f"a worker was lost; its cell goes to another ({len(workers)} left)", lasting=True)
        self._workers = workers
        done = len(self._cells) - len(left)
        failed = f", {len(self._outcome.failures)} failed" if self._outcome.failures else ""
        running = [key for keys in self._client.processing().values() for key in keys if key in left]
        names = "; ".join(f"{self._cells[key].label}" for key in running[:4])
        more = f" and {len(running) - 4} more" if len(running) > 4 else ""
        steps = f" [{' | '.join(self._steps())}]" if running else ""
        self._write(f"{done}/{len(self._cells)} cells{failed}" + (f": {names}{more}{steps}" if running else ""))

    def _steps(self) -> Iterator[str]:
        folder = getattr(self._client, "kvbook_progress", None)
        for file in sorted(folder.glob("progress-*")) if folder else ():
            if said := file.read_text("utf-8", errors="replace").strip():
                yield said

    def _write(self, line: str, lasting: bool = False) -> None:
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[Ksweep: {line}"[: width + 4], end="\n" if lasting else "", file=sys.stderr, flush=True)
            return
        said, when = self._last
        now = time.monotonic()
        if (
            lasting
            or (line != said and now - when >= _SECONDS_BETWEEN_LINES)
            or now - when >= 4 * _SECONDS_BETWEEN_LINES
        ):
            print(f"sweep: {line}", file=sys.stderr, flush=True)
            self._last = (line, now)
