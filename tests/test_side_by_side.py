"""Chapters that are executed side by side."""

import io
import json
import os
import re
import signal
from pathlib import Path

import mini_book
import psutil
import pytest

from kvbook.errors import UserError
from kvreport.running import execution, planning
from kvreport.running.build import Build


def write(root: Path, stem: str, *cells: str) -> None:
    """Write a chapter of these code cells."""
    notebook = mini_book.notebook()
    prose, parameters = notebook["cells"][:2]
    code = [
        {"cell_type": "code", "id": f"c{k}", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for k, source in enumerate(cells)
    ]
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
    """Give code that goes on only once the other chapter's has begun."""
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
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("kvbook: chapter"))
    assert [re.match(r"kvbook: chapter (\w+) failed: ValueError: (\w+);", line).groups() for line in lines] == [
        ("01_one", "first"), ("02_two", "second")
    ]
    assert [chapter.is_fresh() for chapter in plan(book)] == [False, False, True]


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


@pytest.mark.parametrize(
    ("parameters", "jobs"),
    [
        ({}, 2), ({"device": "cpu", "weights": "stand-in", "model": "llama"}, 2), ({"weights": "random"}, 2),
        ({"device": "cuda"}, 1), ({"weights": "hub"}, 1), ({"weights": "package"}, 1), ({"model": "openai/gpt2"}, 1),
    ],
)
def test_chapters_on_one_accelerator_or_with_full_size_weights_run_one_at_a_time(monkeypatch, parameters, jobs):
    monkeypatch.delenv("JOBS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert execution._jobs([planning.Chapter("01_one", "default", parameters)]) == jobs


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_number_of_jobs_that_is_none_is_refused(book, monkeypatch, jobs):
    monkeypatch.setenv("JOBS", jobs)
    with pytest.raises(UserError, match=f"JOBS={jobs} is no number of jobs: give 1 or more"):
        execution.bring_up_to_date(plan(book), io.StringIO())
