"""Chapters that are executed side by side, and what nothing may run beside."""

import io
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import mini_book
import pandas as pd
import psutil
import pytest
from refusing import refusal

from kvreport.running import catalogue, execution, planning
from kvreport.running.kernels import Build


def write(root: Path, stem: str, *cells: str) -> None:
    """Write a chapter of these code cells."""
    notebook = mini_book.notebook()
    prose, parameters = notebook["cells"][:2]
    code = [parameters | {"id": f"c{k}", "metadata": {}, "source": source} for k, source in enumerate(cells)]
    notebook["cells"] = [prose | {"source": f"# {stem}\n"}, parameters, *code]
    (root / "chapters" / f"{stem}.ipynb").write_text(json.dumps(notebook))


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("JOBS", "2")
    root = mini_book.create(tmp_path / "book")
    (root / "chapters" / f"{mini_book.STEM}.ipynb").unlink()
    (root / "parameters" / "few.yaml").unlink()
    return root


def plan(root: Path) -> list[planning.Chapter]:
    return planning.plan("default", mini_book.folders(root))


def meeting(root: Path, mine: str, other: str) -> str:
    """Write code that goes on only once the other chapter's has begun."""
    return (
        "import pathlib, time\n"
        f"pathlib.Path({str(root / mine)!r}).touch()\n"
        "end = time.monotonic() + 40\n"
        f"while not pathlib.Path({str(root / other)!r}).exists():\n"
        "    assert time.monotonic() < end, 'nobody came'\n"
        "    time.sleep(0.05)\n"
    )


def test_two_chapters_run_at_the_same_time_each_in_an_environment_and_folder_of_its_own(book):
    show = "import os\nprint('at', os.getcwd(), os.environ['KVBOOK_CHAPTER'], os.environ['KVBOOK_THREADS'])\n"
    for stem, other in (("01_one", "02_two"), ("02_two", "01_one")):
        write(book, stem, meeting(book, stem, other), show)
    before, said = (dict(os.environ), Path.cwd()), io.StringIO()
    executed = execution.bring_up_to_date(plan(book), said)
    assert sorted(chapter.stem for chapter in executed) == ["01_one", "02_two"]
    assert said.getvalue().count(": done after ") == 2
    for chapter in executed:
        assert f"at {book / 'chapters'} {chapter.stem} 1" in chapter.executed.read_text()
    assert (dict(os.environ), Path.cwd()) == before
    assert execution.bring_up_to_date(plan(book), said) == []


def test_a_chapter_that_fails_keeps_no_other_from_being_executed_and_each_has_its_line(book):
    write(book, "01_one", "raise ValueError('first')\n")
    write(book, "02_two", "raise ValueError('second')\n")
    write(book, "03_three", "x = 1\n")
    done = mini_book.make_book(book)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("kvbook: chapter"))
    assert [re.match(r"kvbook: chapter (\w+) failed: ValueError: (\w+);", line).groups() for line in lines] == [
        ("01_one", "first"), ("02_two", "second")
    ]
    assert [chapter.why_stale() is None for chapter in plan(book)] == [False, False, True]


def test_an_interruption_ends_all_chapters_in_one_line_and_leaves_no_kernel(book):
    notes = [book / "kernel1", book / "kernel2"]
    for stem, note in zip(("01_one", "02_two"), notes, strict=True):
        write(book, stem, f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    # Never begun: they would be, were the rest of the list not dropped.
    write(book, "03_three", "x = 1\n")
    run = mini_book.start(book, "-m", "kvbook", "build")
    mini_book.until(lambda: all(note.is_file() and note.read_text() for note in notes), seconds=60)
    # To this process alone, as `kill -INT` or a supervisor does; a terminal would tell the kernels too.
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    ours = [line for line in said.splitlines() if line.startswith("kvbook: ")]
    assert [line.partition(";")[0] for line in ours] == ["kvbook: interrupted"]
    assert said.count(": interrupted after ") == 2
    assert "Kernel died" not in said
    assert "03_three" not in said
    assert "Traceback" not in said
    for note in notes:
        mini_book.until(lambda note=note: not psutil.pid_exists(int(note.read_text())), seconds=20)
    assert not [path for path in (book / "_build" / "executed").glob("*.ipynb") if "partial" not in path.name]


@pytest.mark.parametrize(("jobs", "threads"), [(2, "2"), (4, "1"), (1, None)])
def test_each_has_its_share_of_the_threads_whether_or_not_another_runs(monkeypatch, jobs, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert Build(None, jobs).environment.get("KVBOOK_THREADS") == threads


@pytest.mark.parametrize(("parameters", "free_gb", "jobs"), [
    ({}, 1, 2), ({"device": "cpu", "weights": "stand-in", "model": "llama"}, 1, 2), ({"weights": "random"}, 1, 2),
    ({"device": "cuda"}, 99, 1), ({"weights": "hub"}, 99, 1), ({"model": "openai/gpt2"}, 99, 1),
    ({"weights": "package"}, 99, 2), ({"weights": "package"}, 9, 1),
])
def test_chapters_on_one_accelerator_or_with_weights_that_fill_the_memory_run_one_at_a_time(
    monkeypatch, parameters, free_gb, jobs
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_gb * 1e9))
    monkeypatch.delenv("JOBS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert execution._jobs([planning.Chapter("01_one", "default", parameters)]) == jobs


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_number_of_jobs_that_is_none_is_refused(book, monkeypatch, jobs):
    monkeypatch.setenv("JOBS", jobs)
    said = refusal(execution.bring_up_to_date, plan(book), io.StringIO())
    assert f"JOBS={jobs} is no number of jobs: give 1 or more" in said


# What nothing may run beside is measured first, alone; then chapters are executed.

# A module of a chapter, as a build finds it: experiments that note when they began and ended.
MEASURING = """
import os, time
from kvbook.runs import Experiment
from kvbook.settings import Settings

def made(name, seconds=0.0, before=lambda: None, **options):
    def measure(settings, made_of, writer):
        import torch
        before()
        began = time.monotonic()
        time.sleep(seconds)
        row = {"name": name, "began": began, "ended": time.monotonic(), "threads": torch.get_num_threads()}
        writer.append("u", [row])
    return Experiment(name, Settings, lambda settings: {}, measure, **options)
"""
GOOD = 'made("good", timed=True)'


def write_chapter(folder: Path, experiments: str) -> None:
    """Write a package that makes experiments, and names those that it makes."""
    (folder / "one").mkdir(exist_ok=True)
    measuring = f"{MEASURING}\nMADE = ({experiments},)\n"
    named = "from one.measuring import MADE\nEXPERIMENTS = {each.name: 1 for each in MADE}\n"
    for name, source in {"__init__": "", "measuring": measuring, "rows": named}.items():
        (folder / "one" / f"{name}.py").write_text(source)


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Return a function that writes a module of experiments, and measures those of them that are to be alone."""
    monkeypatch.setenv("KVBOOK_BUILD", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    def measured(experiments: str) -> tuple[pd.DataFrame, dict, bool, str]:
        write_chapter(tmp_path, experiments)
        said = io.StringIO()
        seconds, all_of_it = execution.measure_alone([("01_one", "one", {}, ["left out"])], Build(said, 2))
        rows = [pd.read_csv(file) for file in tmp_path.glob("runs/*/*/rows.csv") if file.parent.suffix != ".partial"]
        return pd.concat(rows).sort_values("began"), seconds, all_of_it, said.getvalue()

    return measured


def test_what_needs_the_machine_is_measured_one_after_the_other_and_what_measures_time_on_all_threads(ask):
    found, seconds, all_of_it, said = ask(
        'made("first", timed=True), made("shared"), made("second", timed=True), made("own", 0.3, own_threads=True)'
    )
    assert dict(zip(found["name"], found["threads"], strict=True)) == {"first": 2, "second": 2, "own": 1}
    assert (found["ended"].iloc[:-1].to_numpy() <= found["began"].iloc[1:].to_numpy()).all()
    assert seconds["01_one"] >= 0.3
    assert all_of_it
    assert said.count(": done after ") == 1


def test_what_fails_is_known_to_have_failed_and_leaves_no_run_and_what_was_measured_is_not_measured_again(ask):
    first, _, all_of_it, _ = ask(f'made("bad", before=lambda: 1 / 0, timed=True), {GOOD}')
    assert (first["name"].tolist(), all_of_it) == (["good"], False)
    again, _, all_of_it, _ = ask(f'{GOOD}, made("worse", before=lambda: os._exit(3), timed=True)')
    assert (again.equals(first), all_of_it) == (True, False)


@pytest.mark.parametrize(("all_of_it", "jobs"), [(True, 2), (False, 1)])
def test_chapters_run_one_at_a_time_where_something_could_not_be_measured_alone(tmp_path, monkeypatch, all_of_it, jobs):
    monkeypatch.setenv("JOBS", "2")
    chapters = [planning.Chapter(stem, "default", {}, folders=mini_book.folders(tmp_path)) for stem in "abc"]
    running, most = [], []

    def bring(chapter, *_):
        running.append(chapter)
        most.append(len(running))
        time.sleep(0.3)
        running.remove(chapter)

    monkeypatch.setattr(execution, "_execute_unless_fresh", bring)
    monkeypatch.setattr(execution, "measure_alone", lambda *_: ({}, all_of_it))
    execution.bring_up_to_date(chapters, io.StringIO())
    assert (len(most), max(most)) == (3, jobs)


SCRIPT = """
from kvreport.running import execution
from kvreport.running.kernels import Build
execution.measure_alone([("01_one", "one", {}, [])], Build(None, 2))
"""


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGINT])
def test_the_process_that_measures_ends_with_the_build(tmp_path, harm):
    root = mini_book.create(tmp_path / "book")
    note = tmp_path / "note"
    wait = f"lambda: (open({str(note)!r}, 'w').write(str(os.getpid())), time.sleep(600))"
    write_chapter(root, f"made('one', before={wait}, timed=True)")
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
