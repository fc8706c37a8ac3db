"""The phases of a build in which experiments are measured: side by side what measures no time, then the rest alone."""

import io
import itertools
import os
import threading
import time

import psutil
import pytest

from kvbook import paths
from kvreport.running import measuring
from kvreport.running.build import Build
from kvreport.running.measuring import Asked

# A chapter's module of results, as a build finds it: experiments that note when they began and ended.
RESULTS = """
import os, pathlib, time
from kvbook.errors import UserError
from kvbook.runs.experiment import Experiment
from kvbook.settings import Settings

LOG = pathlib.Path(os.environ["KVBOOK_BUILD"]) / "log"

def experiment(name, seconds=0.0, before=lambda: None, **options):
    def measure(settings, made_of, writer):
        import torch
        before()
        began = time.monotonic()
        time.sleep(seconds)
        with LOG.open("a") as file:
            file.write(f"{name} {began} {time.monotonic()} {torch.get_num_threads()}\\n")
        writer.append("u", [{"x": 1}])
    return Experiment(name, Settings, lambda settings: {}, measure, **options)

def meet(mine, other):
    def wait():
        (LOG.parent / mine).touch()
        end = time.monotonic() + 60
        while not (LOG.parent / other).exists():
            assert time.monotonic() < end, "nobody came"
            time.sleep(0.02)
    return wait
"""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Give a function that writes a module of experiments and measures what it lists."""
    monkeypatch.setenv("KVBOOK_BUILD", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.syspath_prepend(tmp_path)

    def measured(experiments: str, build: Build | None = None, forks: bool = True) -> tuple[dict, dict, str]:
        name = f"results_{len(list(tmp_path.glob('results_*.py')))}"
        (tmp_path / f"{name}.py").write_text(f"{RESULTS}\nEXPERIMENTS = ({experiments},)\n")
        said = io.StringIO()
        seconds = measuring.measure_asked([Asked("01_one", name, {})], build or Build(said, 2, forks))
        log = tmp_path / "log"
        lines = [line.split() for line in log.read_text().splitlines()] if log.is_file() else []
        return {line[0]: [float(number) for number in line[1:]] for line in lines}, seconds, said.getvalue()

    return measured


def test_what_measures_no_time_runs_side_by_side_on_its_share_of_the_threads(ask):
    found, seconds, said = ask(
        'experiment("one", before=meet("one", "two")), experiment("two", before=meet("two", "one"))'
    )
    assert {name: threads for name, (_, _, threads) in found.items()} == {"one": 1, "two": 1}
    assert seconds["01_one"] > 0
    assert said.count(": done after ") == 2
    assert "01_one: measuring one" in said


def test_what_measures_time_runs_when_everything_else_has_ended_with_nothing_beside_it_and_all_threads(ask):
    found, _, _ = ask(
        'experiment("first", timed=True), experiment("slow", 0.5), experiment("second", timed=True), '
        'experiment("own", own_threads=True)',
        # Forked processes count threads as the one did that they are forked from.
        forks=False,
    )
    assert found["first"][2] == found["second"][2] == 2
    spans = [found[name][:2] for name in ("slow", "first", "second", "own")]
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))


def test_what_reads_another_experiments_run_waits_for_it(ask):
    found, _, _ = ask('experiment("late", after=("early",)), experiment("early", 0.3)')
    assert found["early"][1] <= found["late"][0]


def test_what_has_been_measured_is_not_measured_again(ask, tmp_path):
    ask('experiment("one")')
    before = (tmp_path / "log").read_text()
    (tmp_path / "results_0.py").rename(tmp_path / "kept.py")
    found, seconds, said = ask('experiment("one")')
    assert ((tmp_path / "log").read_text(), seconds, said) == (before, {}, "")
    assert list(found) == ["one"]


def test_what_fails_keeps_nothing_else_from_being_measured_and_leaves_no_run(ask):
    found, _, _ = ask(
        'experiment("bad", before=lambda: 1 / 0), experiment("dies", before=lambda: os._exit(3)), experiment("good")'
    )
    assert list(found) == ["good"]
    runs = [path for path in paths.RUNS.glob("*/*") if path.is_dir()]
    assert not [path for path in runs if path.parent.name in ("bad", "dies") and not path.name.endswith(".partial")]


def test_a_build_that_is_stopped_ends_what_it_measures(ask):
    build = Build(io.StringIO(), 2, forks=True)

    def stop():
        end = time.monotonic() + 60
        while len(build.processes) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        build.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    # The listing is a process as well; these two never end by themselves.
    found, _, _ = ask('experiment("one", 600), experiment("two", 600)', build=build)
    thread.join()
    assert found == {}
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "results_" in " ".join(child.cmdline())]


def test_what_chapters_publish_is_evaluated_beside_the_measuring_and_only_once(ask, monkeypatch):
    kept, evaluate = set(), []
    monkeypatch.setattr(measuring.evaluated, "is_kept", lambda chapter: chapter in kept)
    monkeypatch.setattr(measuring, "_evaluate_one", lambda stem, build: evaluate.append(stem))
    ask('experiment("one")')
    assert evaluate == ["01_one"]
    kept.add("one")
    ask('experiment("two")')
    assert evaluate == ["01_one"]
