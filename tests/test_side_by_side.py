"""Chapters that are executed side by side, and cells that must be alone."""

import io
import json
import os
import re
import signal
from pathlib import Path

import mini_book
import psutil
import pytest
from test_execution import start, until

from kvbook.errors import UserError
from kvbook.paths import ROOT
from kvreport.running import execution


def write(root: Path, stem: str, *cells: str, alone: bool = False) -> None:
    """Write a chapter of these code cells, the last of which may have to be alone."""
    notebook = mini_book.notebook()
    prose, parameters = notebook["cells"][:2]
    code = [
        {"cell_type": "code", "id": f"c{k}", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for k, source in enumerate(cells)
    ]
    if alone:
        code[-1]["metadata"] = {"tags": ["alone"]}
    notebook["cells"] = [prose | {"source": f"# {stem}\n"}, parameters, *code]
    (root / "chapters" / f"{stem}.ipynb").write_text(json.dumps(notebook))


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("JOBS", "2")
    root = mini_book.create(tmp_path / "book")
    (root / "chapters" / f"{mini_book.STEM}.ipynb").unlink()
    (root / "parameters" / "few.yaml").unlink()
    return root


def plan(root: Path) -> list[execution.Chapter]:
    return execution.plan("default", mini_book.folders(root))


def meeting(root: Path, mine: str, other: str) -> str:
    """Give code that goes on only once the other chapter's has begun."""
    return (
        "import pathlib, time\n"
        f"pathlib.Path({str(root / mine)!r}).touch()\n"
        "end = time.monotonic() + 40\n"
        f"while not pathlib.Path({str(root / other)!r}).exists():\n"
        "    assert time.monotonic() < end, 'nobody came'\n"
        "    time.sleep(0.05)\n"
    )


def test_two_chapters_run_at_the_same_time(book):
    write(book, "01_one", meeting(book, "one", "two"))
    write(book, "02_two", meeting(book, "two", "one"))
    said = io.StringIO()
    executed = execution.bring_up_to_date(plan(book), said)
    assert sorted(chapter.stem for chapter in executed) == ["01_one", "02_two"]
    assert said.getvalue().count(": done after ") == 2
    assert execution.bring_up_to_date(plan(book), said) == []


LOG = """
import time
def note(what):
    with open({log!r}, "a") as file:
        file.write(f"{what} {{time.monotonic()}}\\n")
"""
BUSY = "note('begin {name}')\ntime.sleep({seconds})\nnote('end {name}')\n"


def spans(log: Path) -> dict[str, tuple[float, float]]:
    found: dict[str, list[float]] = {}
    for line in log.read_text().splitlines():
        _, name, at = line.split()
        found.setdefault(name, []).append(float(at))
    return {name: (begin, end) for name, (begin, end) in found.items()}


def overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "control: not tagged"])
def test_while_a_cell_is_alone_no_other_chapters_cell_runs(book, alone):
    log = book / "log"
    begin = LOG.format(log=str(log), what="{what}")
    meet = [meeting(book, "one", "two"), meeting(book, "two", "one")]
    # Both are in the middle of their chapters when the one asks to be alone, and the other has much to do yet.
    write(book, "01_one", begin, meet[0], BUSY.format(name="timed", seconds=2), alone=alone)
    write(book, "02_two", begin, meet[1], *(BUSY.format(name=f"other{k}", seconds=0.4) for k in range(8)))
    execution.bring_up_to_date(plan(book), io.StringIO())
    found = spans(log)
    timed = found.pop("timed")
    assert len(found) == 8
    assert any(overlap(timed, other) for other in found.values()) is not alone


@pytest.mark.parametrize(("jobs", "order"), [("2", ["two", "three", "timed"]), ("1", ["timed", "two", "three"])])
def test_a_chapter_that_waits_to_be_alone_lets_others_begin_but_where_they_go_one_by_one(
    book, monkeypatch, jobs, order
):
    monkeypatch.setenv("JOBS", jobs)
    log = book / "log"
    begin = LOG.format(log=str(log), what="{what}")
    write(book, "01_one", begin, BUSY.format(name="timed", seconds=0.2), alone=True)
    write(book, "02_two", begin, BUSY.format(name="two", seconds=2))
    write(book, "03_three", begin, BUSY.format(name="three", seconds=2))
    execution.bring_up_to_date(plan(book), io.StringIO())
    found = spans(log)
    assert (found["timed"][0] > max(found["two"][1], found["three"][1])) is (jobs == "2")
    assert (found["timed"][1] < found["two"][0]) is (jobs == "1")


def test_chapters_begin_in_the_order_of_the_default_set_and_those_it_leaves_out_at_the_end(book, monkeypatch):
    monkeypatch.setenv("JOBS", "1")
    (book / "parameters" / "default.yaml").write_text("03_three: {}\n01_one: {}\n")
    for stem in ("01_one", "02_two", "03_three"):
        write(book, stem, "x = 1\n")
    chapters = plan(book)
    assert [chapter.place for chapter in chapters] == [(1, 3), (2, 3), (3, 3)]
    executed = execution.bring_up_to_date(chapters, io.StringIO())
    assert [chapter.stem for chapter in executed] == ["03_three", "01_one", "02_two"]


def test_a_chapter_that_fails_keeps_no_other_from_being_executed_and_each_has_its_line(book):
    write(book, "01_one", "raise ValueError('first')\n")
    write(book, "02_two", "raise ValueError('second')\n")
    write(book, "03_three", "x = 1\n")
    with pytest.raises(execution.ChapterFailed) as caught:
        execution.bring_up_to_date(plan(book), io.StringIO())
    lines = sorted(str(caught.value).splitlines())
    assert [re.match(r"chapter (\w+) failed: ValueError: (\w+);", line).groups() for line in lines] == [
        ("01_one", "first"),
        ("02_two", "second"),
    ]
    assert [chapter.is_fresh() for chapter in plan(book)] == [False, False, True]


def test_of_make_book_each_failure_is_a_line_of_its_own(book):
    write(book, "01_one", "raise ValueError('first')\n")
    write(book, "02_two", "raise ValueError('second')\n")
    done = mini_book.make_book(book)
    assert done.returncode != 0
    assert {line.split(" failed")[0] for line in done.stdout.splitlines() if line.startswith("kvbook: chapter")} == {
        "kvbook: chapter 01_one",
        "kvbook: chapter 02_two",
    }


def test_an_interruption_ends_all_chapters_in_one_line_and_leaves_no_kernel(book):
    notes = [book / "kernel1", book / "kernel2"]
    for stem, note in zip(("01_one", "02_two"), notes, strict=True):
        write(book, stem, f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    # Never begun: they would be, were the rest of the list not dropped.
    write(book, "03_three", "x = 1\n")
    run = start(book, "-m", "doit", "-f", str(ROOT / "dodo.py"))
    until(lambda: all(note.is_file() and note.read_text() for note in notes), seconds=60)
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
        until(lambda note=note: not psutil.pid_exists(int(note.read_text())), seconds=20)
    assert not [path for path in (book / "_build" / "executed").glob("*.ipynb") if "partial" not in path.name]


SHOW = "import os\nprint('threads', os.environ.get('KVBOOK_THREADS'))\n"


@pytest.mark.parametrize(("jobs", "threads"), [("2", "2"), ("4", "1"), ("1", "None")])
def test_each_has_its_share_of_the_threads_whether_or_not_another_runs(book, monkeypatch, jobs, threads):
    monkeypatch.setenv("JOBS", jobs)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    write(book, "01_one", SHOW)
    (chapter,) = execution.bring_up_to_date(plan(book), io.StringIO())
    assert f"threads {threads}\\n" in chapter.executed.read_text()


@pytest.mark.parametrize(
    ("parameters", "jobs"),
    [
        ({}, 2), ({"device": "cpu", "weights": "stand-in", "model": "llama"}, 2), ({"weights": "random"}, 2),
        ({"device": "cuda"}, 1), ({"weights": "hub"}, 1), ({"model": "openai-community/gpt2"}, 1),
    ],
)  # fmt: skip
def test_chapters_on_one_accelerator_or_with_full_size_weights_run_one_at_a_time(book, monkeypatch, parameters, jobs):
    monkeypatch.delenv("JOBS")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    write(book, "01_one", "x = 1\n")
    (chapter,) = plan(book)
    assert execution._jobs([execution.Chapter(chapter.stem, "default", parameters, folders=chapter.folders)]) == jobs


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_number_of_jobs_that_is_none_is_refused(book, monkeypatch, jobs):
    monkeypatch.setenv("JOBS", jobs)
    with pytest.raises(UserError, match=f"JOBS={jobs} is no number of jobs: give 1 or more"):
        execution.bring_up_to_date(plan(book), io.StringIO())


def test_folder_and_environment_of_a_chapter_are_its_own(book):
    show = "import os\nprint('at', os.getcwd(), os.environ['KVBOOK_CHAPTER'])\n"
    for stem, other in (("01_one", "02_two"), ("02_two", "01_one")):
        write(book, stem, meeting(book, stem, other), show)
    before = dict(os.environ), Path.cwd()
    for chapter in execution.bring_up_to_date(plan(book), io.StringIO()):
        assert f"at {book / 'chapters'} {chapter.stem}" in chapter.executed.read_text()
    assert (dict(os.environ), Path.cwd()) == before
