"""A sweep ends complete, whatever happens to its workers, and no cell is done twice."""

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import mini_book
import pandas as pd
import psutil
import pytest
import yaml
from refusing import refusal

from kvbook import paths
from kvreport.running import cluster, sweeps

SETTINGS = {"n_samples": 3, "corpus": "texts"}


def write(folder: Path, **content) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


# What a file asks for


def test_a_file_asks_for_every_choice_on_every_axis_once(tmp_path):
    asked = {"experiment": "layer_drift", "model": ["a", "b", "a"], "dtype": ["fp32", "bf16"], "length": [8, 16]}
    cells = sweeps.read(write(tmp_path, **asked, device="cpu"))
    assert len({cell.key for cell in cells}) == len(cells) == 8
    assert cells[0].label == "layer_drift a fp32 8 cpu"
    settings = cells[-1].settings
    assert (settings["model"], settings["reference_model"]) == ("b", "b")
    assert (settings["dtypes"], settings["n_tokens"]) == (["bfloat16"], 16)


DRIFT = {"experiment": "layer_drift"}
REFUSED = {
    "no experiment 'nosuch'": {"experiment": "nosuch"}, "colour: no such name": DRIFT | {"colour": "blue"},
    "length": DRIFT | {"length": [0]}, "float8": DRIFT | {"dtype": "float8"},
    "unknown parameter 'n_smaples'": DRIFT | {"settings": {"n_smaples": 3}},
    "n_new_tokens": {"experiment": "memory_bandwidth", "model": "a", "dtype": "fp32", "length": 3},
    "weights": {"experiment": "scratch_loss", "dtype": "fp32", "length": 2, "settings": {"weights": "hub"}},
    "dtype": {"experiment": "greedy_samples", "model": "a", "length": 3, "device": "cpu", "dtype": "x"},
    "experiment": {},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_file_that_cannot_be_run_is_refused_before_anything_is(tmp_path, message):
    assert message in refusal(lambda: sweeps.read(write(tmp_path, **REFUSED[message])))


@pytest.mark.parametrize("text", ["{", "- a", "", "!!python/object/apply:os.system ['touch harm']"])
def test_what_is_no_file_of_a_sweep_is_refused_and_not_executed(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    assert "sweep.yaml" in refusal(sweeps.read, file)
    assert not (tmp_path / "harm").exists()


def test_the_sweeps_that_ship_can_be_read():
    files = [file for file in (paths.ROOT / "sweeps").glob("*.yaml") if file.name != "slurm.yaml"]
    assert [file.name for file in files if len(sweeps.read(file)) > 1] == ["drift.yaml"]


# How it runs

# Notes every unit that any process finishes: what was done twice stands there twice. Units take a while if they are
# asked to, and where there is the file, the process that has finished one takes it away and kills itself.
NOTING = """
import os, pathlib, signal, time
from kvbook import garbage
garbage.look_less_often()
from kvbook.runs import records
append = records.Writer.append
workplace = pathlib.Path(os.environ["KVBOOK_BUILD"]).parent
def noting(self, unit, rows):
    append(self, unit, rows)
    time.sleep(float(os.environ.get("KVBOOK_TEST_PAUSE", "0")))
    with open(workplace / "units", "a") as file:
        file.write(f"{self._rows.parent.name.removesuffix('.partial')} {unit}\\n")
    if (workplace / "death").exists():
        (workplace / "death").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
records.Writer.append = noting
"""


def prepared(folder: Path, texts: Path) -> Path:
    (folder / "sitecustomize.py").write_text(NOTING)
    (folder / "texts").symlink_to(texts)
    return folder


@pytest.fixture
def workplace(tmp_path, text_folder):
    return prepared(tmp_path, text_folder)


def environment(workplace: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        "KVBOOK_BUILD": str(workplace / "_build"),
        "PYTHONPATH": os.pathsep.join([str(workplace), str(paths.ROOT / "src")]),
    } | more


@pytest.fixture
def sweep_here(kvbook_here, monkeypatch):
    """Return a function that sweeps in this process, with workers in processes of their own."""

    def swept(workplace: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(workplace)
        monkeypatch.setattr(paths, "RUNS", workplace / "_build" / "runs")
        monkeypatch.setattr(paths, "BUILD", workplace / "_build")
        # Dask leaves variables behind that would give the tests after these one thread.
        with patch.dict(os.environ, environment(workplace, **more)):
            return kvbook_here("sweep", "sweep.yaml", *arguments)

    return swept


def runs(workplace: Path) -> list[Path]:
    found = (workplace / "_build" / "runs").glob("*/*/run.json")
    return sorted(file.parent for file in found if file.parent.suffix != ".partial")


def files_of_runs(workplace: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for folder in runs(workplace) for file in folder.iterdir()}


@pytest.fixture(scope="module")
def swept(tmp_path_factory, text_folder, llama_folder, gpt2_folder):
    """A sweep that was interrupted after its first cell."""
    workplace = prepared(tmp_path_factory.mktemp("swept"), text_folder)
    asked = {
        "experiment": "layer_drift", "model": [str(llama_folder), str(gpt2_folder)], "length": [6, 7, 8],
        "device": "cpu", "settings": SETTINGS | {"dtypes": ["float32", "bfloat16"]},
    }
    write(workplace, **asked)
    command = ("-m", "kvbook", "sweep", "sweep.yaml", "--workers", "2")
    process = mini_book.start(workplace, *command, env=environment(workplace, KVBOOK_TEST_PAUSE="0.3"))
    mini_book.until(lambda: runs(workplace) or process.poll() is not None)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    return SimpleNamespace(workplace=workplace, asked=asked, workers=workers, said=said, status=process.returncode)


def test_an_interrupted_sweep_ends_in_one_line_and_leaves_no_worker(swept):
    assert swept.status == 2
    assert swept.said.strip().splitlines()[-1].startswith("kvbook: interrupted; what was finished is kept")
    assert re.search(r"sweep +\d+:\d+ +\d/6 cells, 0 failed: layer_drift ", swept.said)
    assert "Traceback" not in swept.said
    gone, alive = psutil.wait_procs(swept.workers, timeout=20)
    assert (len(gone), alive) == (2, [])


def test_started_again_it_ends_complete_though_its_worker_is_killed_does_no_unit_twice_and_a_bad_cell_fails_alone(
    swept, sweep_here
):
    files, done = files_of_runs(swept.workplace), len(runs(swept.workplace))
    write(swept.workplace, **swept.asked | {"model": [*swept.asked["model"], "nosuch"]})
    (swept.workplace / "death").touch()
    again = sweep_here(swept.workplace, "--workers", "1")
    assert not (swept.workplace / "death").exists()
    assert again.returncode == 1
    *failed, last = again.stdout.splitlines()
    assert len(failed) == 3
    assert all(re.match(r"failed: layer_drift nosuch \d cpu: model 'nosuch' is neither", line) for line in failed)
    assert f"_build/runs: 6 ({6 - done} made now, {done} found), 3 failed" in last
    assert files.items() <= files_of_runs(swept.workplace).items()
    units = (swept.workplace / "units").read_text().splitlines()
    assert len(set(units)) == len(units), "a unit was done twice"
    assert len(runs(swept.workplace)) == 6
    assert not list((swept.workplace / "_build" / "runs").glob("*/*.partial"))
    for folder in runs(swept.workplace):
        rows = pd.read_csv(folder / "rows.csv")
        assert set(rows["sample"]) == set(range(3))
        assert not rows.duplicated(["sample", "dtype", "place", "layer"]).any()


SERVE = """
import time
from distributed import LocalCluster
cluster = LocalCluster(
    n_workers=1, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None, scheduler_port=0,
)
print(cluster.scheduler_address, flush=True)
time.sleep(600)
"""


@pytest.fixture
def scheduler(workplace):
    """A scheduler and a worker as a person starts them, the worker with results of its own in another folder."""
    (workplace / "elsewhere").mkdir()
    elsewhere = environment(workplace, KVBOOK_BUILD=str(workplace / "elsewhere"))
    process = mini_book.start(workplace, "-c", SERVE, env=elsewhere, stderr=subprocess.DEVNULL)
    yield process.stdout.readline().strip()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_an_existing_scheduler_is_used_and_its_workers_send_their_runs(
    workplace, llama_folder, scheduler, sweep_here, refused
):
    write(workplace, experiment="layer_drift", model=str(llama_folder), length=[6, 8], settings=SETTINGS)
    done = sweep_here(workplace, "--scheduler", scheduler)
    assert done.returncode == 0, done.stdout
    assert "_build/runs: 2 (2 made now" in done.stdout
    # Cells for a GPU would wait there for ever.
    write(workplace, experiment="layer_drift", model=str(llama_folder), device="cuda")
    assert "declares a GPU" in refused("sweep", "sweep.yaml", "--scheduler", scheduler)
    theirs = sorted((workplace / "elsewhere" / "runs").glob("*/*/rows.csv"))
    assert [folder.name for folder in runs(workplace)] == [file.parent.name for file in theirs]
    assert [(f / "rows.csv").read_bytes() for f in runs(workplace)] == [file.read_bytes() for file in theirs]


def test_a_run_that_came_over_the_network_is_checked_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    files = {"rows.csv": b"x\n1\n", "run.json": b'{"rows_sha256": "0"}'}
    assert "changed after the run" in refusal(cluster._keep, "e", "0" * 16, files)
    assert not (tmp_path / "e" / ("0" * 16)).exists()
    for name in ("../../harm", "/harm", "0" * 32):
        assert "is it one of yours" in refusal(cluster._keep, "e", name, files)


def test_a_scheduler_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(cluster, "_SECONDS_TO_CONNECT", 1)
    assert "no scheduler answers at tcp://127" in refusal(cluster.sweep, [], scheduler="tcp://127.0.0.1:9")


def test_a_worker_with_another_version_of_the_code_refuses(tmp_path):
    (cell,) = sweeps.read(write(tmp_path, experiment="layer_drift", model="llama"))
    assert "another version" in cluster.compute(cell.experiment, cell.settings, "0" * 64, "")["error"]


def test_cells_for_a_gpu_are_not_left_waiting_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: 0)
    cells = sweeps.read(write(tmp_path, experiment="layer_drift", model="llama", device=["cpu", "cuda"]))
    assert [cell.on_gpu for cell in cells] == [False, True]
    assert "this machine has 0" in refusal(cluster.sweep, cells)


def test_each_worker_of_this_machine_sees_gpus_of_its_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [cluster._environment(i, 1, gpus=2)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [cluster._environment(i, 1, gpus=1)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["4", "6"]


@pytest.mark.parametrize("missing", ["distributed", "cryptography"])
def test_without_the_extra_a_sweep_is_one_clear_line(tmp_path, monkeypatch, refused, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "kvreport.running.cluster")
    monkeypatch.delattr("kvreport.running.cluster")
    file = write(tmp_path, experiment="layer_drift", model="llama")
    assert "pip install -e 'src/kvreport[cluster]'" in refused("sweep", file, "--workers", "1")


# Slurm


def test_the_job_script_asks_for_what_the_file_says_and_submits_nothing(tmp_path, kvbook_here, monkeypatch):
    file = write(tmp_path, experiment="layer_drift", model="llama", device="cuda")
    monkeypatch.setenv("PATH", "/nowhere")
    done = kvbook_here("sweep", file, "--slurm", paths.ROOT / "sweeps" / "slurm.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "cells: 1\n  layer_drift llama cuda\n# 4 jobs of:\n#!/usr/bin/env bash" in done.stdout
    assert all(asked in done.stdout for asked in ("#SBATCH --gres=gpu:1\n", "--resources GPU=1", "--nthreads 1 "))


# Takes a job script from standard input or a file as Slurm does, and runs it at once on this machine.
SBATCH = """\
#!/bin/sh
cp "$1" "{folder}/job.sh"
setsid bash "{folder}/job.sh" > "{folder}/job.log" 2>&1 < /dev/null &
echo "$!" > "{folder}/job.pid"
echo "Submitted batch job $!"
"""


def test_a_sweep_runs_on_the_workers_that_slurm_starts(workplace, llama_folder, sweep_here):
    commands = workplace / "commands"
    commands.mkdir()
    for name, script in (("sbatch", SBATCH.format(folder=workplace)), ("scancel", "#!/bin/sh\nkill -9 -- -$1\n")):
        (commands / name).write_text(script)
        (commands / name).chmod(stat.S_IRWXU)
    (workplace / "slurm.yaml").write_text("jobs: 1\ncores: 1\nmemory: 2GB\ninterface: lo\n")
    write(workplace, experiment="layer_drift", model=str(llama_folder), length=[6, 8], settings=SETTINGS)
    told = {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(workplace)}
    done = sweep_here(workplace, "--slurm", "slurm.yaml", **told)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_build/runs: 2 (2 made now" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    script = (workplace / "job.sh").read_text()
    assert "tls://" in script
    # What the job prints goes into the build folder, not beside the sources.
    assert re.search(r"^#SBATCH -o \S*_build/slurm/", script, re.MULTILINE)
    mini_book.until(lambda: not psutil.pid_exists(int((workplace / "job.pid").read_text())), seconds=30)
    # The private key lay in a folder below the home folder, which is gone.
    assert f"--tls-key {workplace}/kvbook-certificates-" in script
    assert not list(workplace.glob("kvbook-certificates-*"))


@pytest.mark.parametrize(
    "text", ["", "cores: 1\n", "jobs: many\ncores: 1\nmemory: 1GB\n", "jobs: 1\ncolour: blue\n", "["]
)
def test_options_that_are_none_of_slurms_are_one_line(tmp_path, text):
    file = tmp_path / "slurm.yaml"
    file.write_text(text)
    assert "slurm.yaml" in refusal(cluster.slurm_script, file, gpu=False)
