"""Running a sweep's cells on the workers of a Dask cluster: this machine's own, one that is there, or one on Slurm.

A cell is a call of its experiment, whose run has a folder named by what makes it.  So nothing here keeps count of what
is done: a cell that was finished is found, one that was begun goes on behind its last whole unit, and two workers that
get the same cell never work on it at once.  When a worker is lost, the scheduler gives its cell to another.

Workers whose ``_build`` is another folder keep their runs there, and a copy is fetched from them.

Dask pickles what it sends between scheduler, workers and client.  The clusters that are started here talk TLS with
certificates that Dask makes for each, so that nobody else on the machine or the network can send them anything.
"""

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
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
from kvreport.running.screen import Screen
from kvreport.running.sweeps import Cell

# How often a cell that failed for another reason than its settings is tried again.
_RETRIES = 1
_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_TO_CONNECT = 15
# Each worker imports torch before it is there.
_SECONDS_TO_START = 300
_MISSING = "a sweep needs Dask Distributed: pip install -e 'src/kvreport[cluster]'"


@dataclass
class Outcome:
    """What came of a sweep: how many cells are finished, how many of them were made now, and a line for each that failed."""

    finished: int = 0
    made: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Say it in a few lines."""
        lines = [f"failed: {label}: {why}" for label, why in self.failures.items()]
        lines.append(
            f"{self.finished} cells are finished in {paths.RUNS} ({self.made} made now, {self.finished - self.made} found), "
            f"{len(self.failures)} failed"
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
    from distributed import Client, LocalCluster

    class Local(LocalCluster):
        def new_worker_spec(self) -> dict[int, Any]:
            ((index, spec),) = super().new_worker_spec().items()
            return {index: spec | {"options": spec["options"] | {"env": _environment(index, threads, gpus)}}}

    # A cell holds the interpreter for long; that is no reason to give its worker up.
    settings = {"distributed.scheduler.worker-ttl": None, "distributed.logging.distributed": "critical"}
    with (
        tempfile.TemporaryDirectory(prefix="kvbook-sweep-") as scratch,
        dask.config.set(settings),
        Local(
            n_workers=0, threads_per_worker=1, memory_limit=0, security=True, dashboard_address=None,
            local_directory=scratch, resources={"GPU": 1} if gpus else {}, silence_logs=logging.CRITICAL,
            preload=["from kvbook import garbage; garbage.look_less_often()"],
        ) as cluster,
        Client(cluster) as client,
    ):
        cluster.scale(n_workers)
        client.wait_for_workers(n_workers, timeout=_SECONDS_TO_START)
        yield client


def _environment(index: int, threads: int, gpus: int) -> dict[str, str]:
    # Dask sets some of these to one itself, but only for what a worker imports after it has started.
    values = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    # What each says of its cell would stand among what the sweep says.
    values[progress.PROGRESS_VARIABLE] = os.devnull
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range((index + 1) * gpus)]
        values["CUDA_VISIBLE_DEVICES"] = ",".join(names[index * gpus : (index + 1) * gpus])
    return values


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

    # The workers read the certificates in a folder that they see too.
    with tempfile.TemporaryDirectory(prefix="kvbook-certificates-", dir=Path.home()) as shared:
        cluster, jobs = _slurm_cluster(options_file, gpu, security=True, shared_temp_directory=shared)
        with cluster, Client(cluster) as client:
            cluster.scale(jobs=jobs)
            yield client
        # dask-jobqueue would delete its copies when they are collected, after the folder is gone, and complain.
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
    from distributed import wait

    futures = {
        client.submit(
            compute, cell.experiment, cell.settings, cell.source,
            key=cell.key, resources={"GPU": 1} if cell.on_gpu else None, retries=_RETRIES,
            # A cell is found by its folder; a result that some scheduler remembers may be of a folder that is gone.
            pure=False,
        ): cell
        for cell in cells
    }
    outcome = Outcome()

    def said() -> str:
        running = [key.partition("|")[0] for keys in client.processing().values() for key in keys]
        return f"{len(cells) - len(futures)}/{len(cells)} cells, {len(outcome.failures)} failed: {'; '.join(running)}"

    with Screen().job("sweep") as job:
        while futures:
            with contextlib.suppress(TimeoutError):
                wait(list(futures), timeout=_SECONDS_BETWEEN_LOOKS, return_when="FIRST_COMPLETED")
            for future in [future for future in futures if future.done()]:
                _settle(client, futures.pop(future), future, outcome)
            job.said = said()
    return outcome


def _settle(client: Any, cell: Cell, future: Any, outcome: Outcome) -> None:
    error = future.exception()
    if error is not None:
        outcome.failures[cell.label] = " ".join(f"{type(error).__name__}: {error}".split())
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
        _keep(cell.experiment, folder.name, files)
    outcome.finished += 1
