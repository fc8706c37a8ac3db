"""What nothing may run beside is measured first, alone; then chapters are executed."""

import io
import os
import signal
import time

import mini_book
import pandas as pd
import psutil
import pytest

from kvreport.running import alone, catalogue, execution, planning
from kvreport.running.build import Build

# A chapter's module of results, as a build finds it: experiments that note when they began and ended.
RESULTS = """
import os, time
from kvbook.runs.experiment import Experiment
from kvbook.settings import Settings

def experiment(name, seconds=0.0, before=lambda: None, **options):
    def measure(settings, made_of, writer):
        import torch
        before()
        began = time.monotonic()
        time.sleep(seconds)
        row = {"name": name, "began": began, "ended": time.monotonic(), "threads": torch.get_num_threads()}
        writer.append("u", [row])
    return Experiment(name, Settings, lambda settings: {}, measure, **options)
"""
GOOD = 'experiment("good", timed=True)'


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Return a function that writes a module of experiments, and measures those of them that are to be alone."""
    monkeypatch.setenv("KVBOOK_BUILD", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    def measured(experiments: str) -> tuple[pd.DataFrame, dict, bool, str]:
        (tmp_path / "results.py").write_text(f"{RESULTS}\nEXPERIMENTS = ({experiments},)\n")
        said = io.StringIO()
        seconds, all_of_it = alone.measure_asked([("01_one", "results", {})], Build(said, 2))
        rows = [pd.read_csv(file) for file in tmp_path.glob("runs/*/*/rows.csv") if file.parent.suffix != ".partial"]
        return pd.concat(rows).sort_values("began"), seconds, all_of_it, said.getvalue()

    return measured


def test_what_needs_the_machine_is_measured_one_after_the_other_and_what_measures_time_on_all_threads(ask):
    found, seconds, all_of_it, said = ask(
        'experiment("first", timed=True), experiment("shared"), experiment("second", timed=True), '
        'experiment("own", 0.3, own_threads=True)'
    )
    assert dict(zip(found["name"], found["threads"], strict=True)) == {"first": 2, "second": 2, "own": 1}
    assert (found["ended"].iloc[:-1].to_numpy() <= found["began"].iloc[1:].to_numpy()).all()
    assert seconds["01_one"] >= 0.3
    assert all_of_it
    assert said.count(": done after ") == 1


def test_what_fails_is_known_to_have_failed_and_leaves_no_run_and_what_was_measured_is_not_measured_again(ask):
    first, _, all_of_it, _ = ask(f'experiment("bad", before=lambda: 1 / 0, timed=True), {GOOD}')
    assert (first["name"].tolist(), all_of_it) == (["good"], False)
    again, _, all_of_it, _ = ask(f'experiment("worse", before=lambda: os._exit(3), timed=True), {GOOD}')
    last, _, now_all_of_it, _ = ask(GOOD)
    assert (all_of_it, now_all_of_it) == (False, True)
    assert again.equals(first)
    assert last.equals(first)


@pytest.mark.parametrize(("all_of_it", "at_most"), [(True, 2), (False, 1)])
def test_chapters_run_one_at_a_time_where_something_could_not_be_measured_alone(
    tmp_path, monkeypatch, all_of_it, at_most
):
    monkeypatch.setenv("JOBS", "2")
    chapters = [planning.Chapter(stem, "default", {}, folders=mini_book.folders(tmp_path)) for stem in "abc"]
    running, most = [], []

    def bring(chapter, *_):
        running.append(chapter)
        most.append(len(running))
        time.sleep(0.3)
        running.remove(chapter)

    monkeypatch.setattr(execution, "_execute_unless_fresh", bring)
    monkeypatch.setattr(alone, "measure", lambda *_: ({}, all_of_it))
    execution.bring_up_to_date(chapters, io.StringIO())
    assert (len(most), max(most)) == (3, at_most)


SCRIPT = """
from kvreport.running import alone
from kvreport.running.build import Build
alone.measure_asked([("01_one", "results", {})], Build(None, 2))
"""


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGINT])
def test_the_process_that_measures_ends_with_the_build(tmp_path, harm):
    root = mini_book.create(tmp_path / "book")
    note = tmp_path / "note"
    wait = f"lambda: (open({str(note)!r}, 'w').write(str(os.getpid())), time.sleep(600))"
    (root / "results.py").write_text(f"{RESULTS}\nEXPERIMENTS = (experiment('one', before={wait}, timed=True),)\n")
    run = mini_book.start(root, "-c", SCRIPT)
    mini_book.until(lambda: note.is_file() and note.read_text(), seconds=60)
    measuring = psutil.Process(int(note.read_text()))
    assert measuring.ppid() == run.pid
    run.send_signal(harm)
    run.communicate(timeout=60)
    mini_book.until(lambda: not measuring.is_running(), seconds=20)


def test_chapters_say_that_experiments_are_alone_where_and_only_where_some_are():
    needing = {e.settings.__module__.split(".")[2] for e in catalogue.EXPERIMENTS.values() if e.needs_the_machine}
    assert {chapter.name for chapter in planning.plan() if chapter.about.alone} == needing
    assert len(needing) > 2
