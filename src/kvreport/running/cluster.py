"""Running a sweep's cells on the workers of a Dask cluster: this machine's own, one that is there, or one on Slurm.

A cell is a call of its experiment, whose run has a folder named by what makes it.  So nothing here keeps count of what
is done: a finished cell is found, an interrupted one goes on after its last whole unit, and two workers that get the
same cell never work on it at once.  When a worker is lost, the scheduler gives its cell to another.

Workers whose ``_build`` is another folder keep their runs there, and send a copy.

Dask pickles what it sends between scheduler, workers and client.  The clusters that are started here talk TLS with
certificates that Dask makes for each, so that nobody else on the machine or the network can send them anything.
"""

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import torch
import yaml
from distributed import Client, Future, LocalCluster, wait

from kvbook import UserError, paths, progress, refusing
from kvbook.runs import records
from kvreport.running import catalogue
from kvreport.running.screen import Screen
from kvreport.running.sweeps import Cell

_SECONDS_TO_CONNECT = 15
_FILES = ("rows.csv", "run.json")


@dataclass
class Swept:
    """How many cells are finished, how many of those were made now, and a line for each that failed."""

    finished: int = 0
    made: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Say it in a few lines."""
        lines = [f"failed: {label}: {why}" for label, why in self.failures.items()]
        counts = f"({self.made} made now, {self.finished - self.made} found), {len(self.failures)} failed"
        return "\n".join([*lines, f"cells finished in {paths.RUNS}: {self.finished} {counts}"])


def compute(experiment: str, settings: Mapping[str, Any], source: str, destination: str) -> dict[str, Any]:
    """Run a cell; this is what a worker does. Its files come with the answer if they lie elsewhere."""
    if catalogue.EXPERIMENTS[experiment].source != source:
        return {"error": "the worker has another version of kvbook: install one and the same everywhere"}
    try:
        run = catalogue.run(experiment, settings)
    except UserError as error:
        # Not raised: settings that cannot be run cannot be run on another worker either.
        return {"error": str(error)}
    elsewhere = run is not None and str(paths.RUNS) != destination
    files = {name: (run.folder / name).read_bytes() for name in _FILES} if elsewhere else {}
    return {"made": bool(run and run.made), "name": run and run.folder.name, "files": files}


def _keep(experiment: str, name: str, files: Mapping[str, bytes]) -> None:
    """Write a run that came from another machine, as atomically as one of our own."""
    # Names that come over the network are not trusted to stay in the folder.
    if not re.fullmatch(r"[0-9a-f]{16}", name):
        raise UserError(f"a worker sent a run called {name!r}: is it one of yours?")
    final = paths.RUNS / experiment / name
    lock = final.with_name(f".{name}.lock")
    with records.alone(lock, f"fetches {experiment}/{name}"), records.writable(final.parent):
        if not final.is_dir():
            staged = final.with_name(f".{name}.fetched")
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
            for file in _FILES:
                (staged / file).write_bytes(files[file])
            records.load(staged)
            staged.rename(final)


@contextmanager
def local(n_workers: int, threads: int, gpus: int = 0) -> Iterator[Client]:
    """Start workers on this machine, each a process with a number of CPU threads, and GPUs of its own if any."""

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
        # Each imports torch before it is there.
        client.wait_for_workers(n_workers, timeout=300)
        yield client


def _environment(index: int, threads: int, gpus: int) -> dict[str, str]:
    # Dask sets some of these to one itself, but only for what a worker imports after it has started.
    values = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    # What each worker says of its cell would be mixed with what the sweep says.
    values[progress.PROGRESS_VARIABLE] = os.devnull
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range((index + 1) * gpus)]
        values["CUDA_VISIBLE_DEVICES"] = ",".join(names[index * gpus : (index + 1) * gpus])
    return values


@contextmanager
def existing(address: str, needs_gpu: bool) -> Iterator[Client]:
    """Connect to a scheduler that is there; its workers must have this version of kvbook installed."""
    kinds = OSError, ValueError, TypeError
    with refusing(lambda error: f"no scheduler answers at {address}: {type(error).__name__}", *kinds):
        client = Client(address, timeout=_SECONDS_TO_CONNECT)
    with client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if needs_gpu and not any(worker.get("resources", {}).get("GPU") for worker in workers):
            # Dask would wait for one, for ever and without a word.
            raise UserError(f"no worker at {address} declares a GPU: start them with `dask worker --resources GPU=1`")
        yield client


@contextmanager
def on_slurm(options_file: Path, gpu: bool) -> Iterator[Client]:
    """Start workers as jobs of Slurm."""
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
    cluster, jobs = _slurm_cluster(options_file, gpu)
    with cluster:
        return f"# {jobs} jobs of:\n{cluster.job_script()}"


def _slurm_cluster(options_file: Path, gpu: bool, **more: Any) -> tuple[Any, int]:
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
    cells: list[Cell], scheduler: str | None = None, slurm: Path | None = None, workers: int | None = None,
    threads: int = 1, gpus: int = 1,
) -> Swept:
    """Run the cells of a sweep where it is asked for."""
    needs_gpu = any(cell.on_gpu for cell in cells)
    if scheduler:
        cluster = existing(scheduler, needs_gpu)
    elif slurm:
        cluster = on_slurm(slurm, needs_gpu)
    else:
        gpus = gpus if needs_gpu else 0
        there = torch.cuda.device_count() // gpus if gpus else max(1, (os.cpu_count() or 1) // threads)
        if not there:
            raise UserError(f"{gpus} GPU a worker; this machine has {torch.cuda.device_count()}: sweep device: [cpu]")
        most = min(workers or there, there) if gpus else workers or there
        cluster = local(min(most, len(cells)), threads, gpus)
    words = "interrupted; what was finished is kept, and the same sweep goes on from there"
    with refusing(words, KeyboardInterrupt), cluster as client:
        return run(client, cells)


def run(client: Client, cells: list[Cell]) -> Swept:
    """Run the cells of a sweep, and say how far."""
    futures = {
        client.submit(
            compute, cell.experiment, cell.settings, catalogue.EXPERIMENTS[cell.experiment].source, str(paths.RUNS),
            # A cell that failed for another reason than its settings is tried once more.
            key=cell.key, resources={"GPU": 1} if cell.on_gpu else None, retries=1,
            # A cell is found by its folder; a result that some scheduler remembers may be of a folder that is gone.
            pure=False,
        ): cell
        for cell in cells
    }
    swept = Swept()
    with Screen().job("sweep") as job:
        while futures:
            with suppress(TimeoutError):
                wait(list(futures), timeout=5, return_when="FIRST_COMPLETED")
            for future in [future for future in futures if future.done()]:
                _settle(futures.pop(future), future, swept)
            running = "; ".join(key.partition("|")[0] for keys in client.processing().values() for key in keys)
            job.said = f"{len(cells) - len(futures)}/{len(cells)} cells, {len(swept.failures)} failed: {running}"
    return swept


def _settle(cell: Cell, future: Future, swept: Swept) -> None:
    error = future.exception()
    result = {} if error else future.result()
    if error or "error" in result:
        why = result.get("error") or f"{type(error).__name__}: {error}"
        swept.failures[cell.label] = " ".join(why.split())
        return
    if result["files"]:
        _keep(cell.experiment, result["name"], result["files"])
    swept.finished += 1
    swept.made += result["made"]
