"""Progress is said where its user looks, and never in a notebook's outputs."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import termios

import mini_book
import pytest

from kvbook import progress

LOOP = "from kvbook.progress import track\nprint([n for n in track(range(3), label='sample')])\n"


@pytest.fixture
def progress_file(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_WRITES", 0)
    # A loop that another test left by an error is under way until it is garbage.
    monkeypatch.setattr(progress, "_running", [])
    file = tmp_path / "progress"
    monkeypatch.setenv(progress.PROGRESS_VARIABLE, str(file))
    return file


def test_items_come_through_in_order_and_the_file_says_how_many_are_done(progress_file):
    said = [(item, progress_file.read_text()) for item in progress.track("abc", label="sample")]
    assert said == [("a", "sample 0/3"), ("b", "sample 1/3"), ("c", "sample 2/3")]
    # Of unknown length.
    assert [progress_file.read_text() for _ in progress.track(iter("ab"), label="x")] == ["x 0", "x 1"]


def test_a_loop_in_a_loop_shows_both(progress_file):
    seen = []
    for _ in progress.track("ab", label="model"):
        seen += [progress_file.read_text() for _ in progress.track("cd", label="sample")]
    assert seen[-1] == "model 1/2 · sample 1/2"
    assert progress_file.read_text() == ""


def test_a_loop_that_fails_takes_its_line_back(progress_file):
    with contextlib.suppress(ZeroDivisionError):
        for _ in progress.track("ab", label="sample"):
            raise ZeroDivisionError
    assert progress_file.read_text() == ""
    assert progress._running == []


def test_fast_items_do_not_write_the_file_each_time(progress_file, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_WRITES", 60)
    for _ in progress.track(range(1000), label="sample"):
        assert progress_file.read_text() == "sample 0/1000"


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_a_log_gets_lines(tmp_path):
    command = {"args": [sys.executable, "-c", LOOP], "env": mini_book.environment(tmp_path), "stdout": subprocess.PIPE}
    log = subprocess.run(**command, stderr=subprocess.PIPE, check=True)
    assert (log.stdout, log.stderr) == (b"[0, 1, 2]\n", b"sample 0/3\n")
    ours, theirs = pty.openpty()
    # A new terminal is no columns wide, and tqdm draws nothing into that.
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        ran = subprocess.run(**command, stderr=theirs, check=True)
        shown = terminal.read(4096)
        os.close(theirs)
    assert ran.stdout == b"[0, 1, 2]\n"
    assert b"sample" in shown
    assert b"%|" in shown


@pytest.mark.slow
def test_plain_papermill_shows_progress_on_its_terminal_and_keeps_it_out_of_the_notebook(tmp_path):
    root = mini_book.create(tmp_path)
    # The negative control lies beside it: a print to standard error does become an output.
    mini_book.write(root, run=mini_book.CODE["run"] + 'print("remark", file=sys.stderr)\n')
    out = tmp_path / "out.ipynb"
    ran = mini_book.run(root, "-m", "papermill", f"chapters/{mini_book.STEM}.ipynb", str(out), "-p", "n", "3")
    assert ran.returncode == 0, ran.stdout
    assert "square 0/3" in ran.stdout
    outputs = [output for cell in json.loads(out.read_text())["cells"] for output in cell.get("outputs", [])]
    said = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    assert "remark" in said
    assert "square 0/3" not in said
