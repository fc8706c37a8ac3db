"""A chapter runs when something that could change its outputs has; it finishes, or it never happened."""

import importlib.metadata
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mini_book
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager

from kvbook import fingerprint
from kvbook.errors import UserError
from kvreport.running import execution, planning
from kvreport.running import screen as live


@pytest.fixture(scope="module")
def executed_once(tmp_path_factory):
    root = mini_book.create(tmp_path_factory.mktemp("executed"))
    (chapter,) = planning.plan("default", mini_book.folders(root))
    execution.execute(chapter, out=io.StringIO())
    return root


@pytest.fixture
def root(executed_once, tmp_path):
    return shutil.copytree(executed_once, tmp_path / "book")


def only_chapter(root: Path, profile: str = "default") -> planning.Chapter:
    (chapter,) = planning.plan(profile, mini_book.folders(root))
    return chapter


def outputs(root: Path) -> list[dict]:
    cells = json.loads(only_chapter(root).executed.read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


# What is fresh


def test_an_executed_chapter_is_fresh_and_is_not_executed_again(root):
    before = only_chapter(root).executed.stat().st_mtime_ns
    assert only_chapter(root).why_stale() is None
    assert execution.bring_up_to_date([only_chapter(root)]) == []
    assert only_chapter(root).executed.stat().st_mtime_ns == before


def test_dates_do_not_matter(root):
    for file in (f for f in root.rglob("*") if f.is_file()):
        os.utime(file, (1, 1))
    assert only_chapter(root).is_fresh()


def test_an_edit_of_the_prose_leaves_a_chapter_fresh(root):
    mini_book.write(root, prose="# Other words\n")
    assert only_chapter(root).is_fresh()


def test_an_edit_of_the_code_makes_a_chapter_stale(root):
    mini_book.write(root, last="print(0)\n")
    assert only_chapter(root).why_stale() == "its inputs have changed"


def test_another_parameter_makes_a_chapter_stale(root):
    assert not only_chapter(root, "few").is_fresh()


def test_a_change_of_the_data_makes_a_chapter_stale_and_a_note_about_it_does_not(root):
    (root / "data" / "README.md").write_text("What the columns mean.\n")
    assert only_chapter(root).is_fresh()
    (root / "data" / "numbers.csv").write_text("x\n2\n")
    assert not only_chapter(root).is_fresh()


def test_another_version_of_a_library_makes_a_chapter_stale(root, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0" if name == "torch" else version(name))
    assert not only_chapter(root).is_fresh()


@pytest.mark.parametrize(
    ("package", "module", "matters"),
    [
        ("kvbook", "progress.py", True),
        ("kvbook", "paths.py", True),
        ("kvreport", "site/build.py", False),
        ("kvbook", "measuring/full_and_split.py", False),
    ],
    ids=["imported", "imported by an import", "the site's", "another experiment's"],
)
def test_only_modules_that_a_chapter_imports_make_it_stale(root, tmp_path, monkeypatch, package, module, matters):
    copies = {name: shutil.copytree(folder, tmp_path / name) for name, folder in fingerprint.PACKAGES.items()}
    monkeypatch.setattr(fingerprint, "PACKAGES", copies)
    fingerprint.reached.cache_clear()
    assert only_chapter(root).is_fresh()
    with (copies[package] / module).open("a") as file:
        file.write("\nCHANGED = True\n")
    fingerprint.reached.cache_clear()
    try:
        assert only_chapter(root).is_fresh() is not matters
    finally:
        fingerprint.reached.cache_clear()


@pytest.mark.parametrize("harm", ["removed", "changed"])
def test_a_figure_file_that_is_not_the_runs_own_makes_a_chapter_stale(root, harm):
    file = only_chapter(root).figures / "fig-squares.svg"
    if harm == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes() + b"\n")
    assert "fig-squares.svg" in only_chapter(root).why_stale()


def test_a_damaged_copy_is_stale(root):
    copy = only_chapter(root).executed
    copy.write_text(copy.read_text()[:1000])
    assert only_chapter(root).why_stale() == "its executed copy is damaged"


# What an executed copy holds


def test_the_copy_says_what_made_it(root):
    stored = json.loads(only_chapter(root).executed.read_text())["metadata"]["kvbook"]
    assert stored["profile"] == "default"
    assert stored["duration_s"] > 0
    assert stored["versions"]["torch"] == importlib.metadata.version("torch")
    assert stored["machine"]["device_name"]
    assert set(stored["files"]) == {
        "fig-squares.svg", "fig-squares.pdf", "fig-squares.png", "fig-squares.csv", "tab-squares.csv"
    }


def test_progress_never_becomes_an_output(root):
    texts = [output["text"] for output in outputs(root) if output["output_type"] == "stream"]
    assert [text.split()[:2] for text in texts] == [["run", "by"], ["the", "last"]]


def test_a_parameter_of_the_profile_reaches_the_chapter(root):
    execution.execute(only_chapter(root, "few"), out=io.StringIO())
    assert "the last square is 1.33\n" in [o.get("text") for o in outputs(root)]
    assert only_chapter(root, "few").is_fresh()


def test_a_foreign_kernelspec_named_python3_does_not_run_the_chapter(root, tmp_path, monkeypatch):
    foreign = tmp_path / "jupyter" / "kernels" / "python3"
    foreign.mkdir(parents=True)
    spec = {"argv": ["/bin/false", "{connection_file}"], "display_name": "Foreign", "language": "python"}
    (foreign / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    # The control: whoever asks for "python3" by name gets the foreign one.
    assert KernelSpecManager().get_kernel_spec("python3").argv[0] == "/bin/false"
    only_chapter(root).executed.unlink()
    execution.execute(only_chapter(root), out=io.StringIO())
    assert f"run by {sys.executable}\n" in [output.get("text") for output in outputs(root)]


def test_what_an_experiment_reports_is_passed_on_while_it_runs(root, monkeypatch):
    monkeypatch.setattr(live, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(live, "SECONDS_BETWEEN_LINES", 0.1)
    slow = mini_book.CODE["run"] + (
        'import time\nfor _ in progress.track(range(3), label="sample"):\n    time.sleep(0.3)\n'
    )
    mini_book.write(root, run=slow)
    said = io.StringIO()
    execution.execute(only_chapter(root), why="its inputs have changed", out=said)
    lines = said.getvalue().splitlines()
    assert lines[0] == f"chapter 1 of 1: {mini_book.STEM} (its inputs have changed)"
    assert any("cell 2 of 5  sample 2/3" in line for line in lines)
    assert "done after" in lines[-1]


def test_a_silent_chapter_still_shows_that_it_runs(root, monkeypatch):
    monkeypatch.setattr(live, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(live, "SECONDS_BETWEEN_LINES", 0.1)
    monkeypatch.setattr(live, "SECONDS_WITHOUT_NEWS", 0.2)
    mini_book.write(root, run=mini_book.CODE["run"] + "import time\ntime.sleep(1)\n")
    said = io.StringIO()
    execution.execute(only_chapter(root), out=said)
    assert said.getvalue().count("cell 2 of 5") >= 2


def test_the_environment_is_left_as_it_was(root, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    before = dict(os.environ)
    mini_book.write(root, run="raise ValueError\n")
    with pytest.raises(execution.ChapterFailed):
        execution.execute(only_chapter(root), out=io.StringIO())
    assert dict(os.environ) == before


# What is refused


def refusal(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_parameter_is_refused_before_anything_runs(root):
    (root / "parameters" / "few.yaml").write_text(f"{mini_book.STEM}:\n  n_smaples: 3\n")
    before = sorted(root.rglob("*"))
    message = refusal(execution.execute, only_chapter(root, "few"))
    assert "no parameter 'n_smaples'" in message
    assert "n, label" in message
    assert sorted(root.rglob("*")) == before


def test_an_unknown_chapter_in_a_parameter_file_is_refused(root):
    (root / "parameters" / "few.yaml").write_text("01_sqares:\n  n: 3\n")
    message = refusal(planning.plan, "few", mini_book.folders(root))
    assert "'01_sqares'" in message
    assert mini_book.STEM in message


def test_an_unknown_profile_is_refused_with_those_that_exist(root):
    message = refusal(planning.plan, "fast", mini_book.folders(root))
    assert "'fast'" in message
    assert "default, few" in message


@pytest.mark.parametrize("content", ["{", "- a\n", f"{mini_book.STEM}: 3\n"])
def test_a_parameter_file_that_is_none_is_refused(root, content):
    (root / "parameters" / "few.yaml").write_text(content)
    assert "few.yaml" in refusal(planning.plan, "few", mini_book.folders(root))


# What fails


def test_a_failed_chapter_leaves_a_partial_copy_and_changes_nothing_else(root):
    chapter = only_chapter(root)
    before = {f: f.read_bytes() for f in (chapter.executed, *sorted(chapter.figures.iterdir()))}
    mini_book.write(root, table='raise ValueError("of two\\nlines")\n')
    message = refusal(execution.execute, only_chapter(root))
    assert message.startswith(f"chapter {mini_book.STEM} failed: ValueError: of two lines")
    assert chapter.partial.name in message
    assert chapter.partial.is_file()
    assert {f: f.read_bytes() for f in (chapter.executed, *sorted(chapter.figures.iterdir()))} == before
    # The old copy is of the old code, and says so.
    assert not only_chapter(root).is_fresh()


def test_a_chapter_that_never_succeeded_has_no_executed_copy(tmp_path):
    root = mini_book.create(tmp_path)
    mini_book.write(root, last="undefined_name\n")
    refusal(execution.execute, only_chapter(root))
    assert not only_chapter(root).executed.exists()
    assert not only_chapter(root).figures.exists()


def test_a_kernel_that_dies_is_a_failed_chapter(root):
    mini_book.write(root, run="import os\nos._exit(1)\n")
    message = refusal(execution.execute, only_chapter(root))
    assert message.startswith(f"chapter {mini_book.STEM} failed: ")


@pytest.fixture
def waiting_book(tmp_path):
    """A book whose chapter, half done, notes its kernel's process and waits; and the file with that note."""
    root = mini_book.create(tmp_path)
    note = tmp_path / "kernel"
    wait = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    mini_book.write(root, table=wait)
    return root, note


def start(root: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=root,
        env=mini_book.environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell's background job ignores Ctrl-C, and its children inherit that; the command here must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_killed_run_leaves_no_copy_and_no_kernel_and_the_next_one_finishes(waiting_book):
    root, note = waiting_book
    run = start(
        root, "-c", "from kvreport.running import execution as e, planning; e.bring_up_to_date(planning.plan())"
    )
    until(lambda: note.is_file() and note.read_text(), seconds=60)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert not only_chapter(root).executed.exists()
    assert not only_chapter(root).figures.exists()
    until(lambda: not psutil.pid_exists(int(note.read_text())), seconds=20)
    mini_book.write(root)
    execution.execute(only_chapter(root), out=io.StringIO())
    assert only_chapter(root).is_fresh()


def test_an_interrupted_make_book_ends_in_one_line(waiting_book):
    root, note = waiting_book
    run = start(root, "-m", "kvbook", "build")
    until(lambda: note.is_file() and note.read_text(), seconds=60)
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=30)
    assert run.returncode != 0
    assert "kvbook: interrupted" in said
    assert "Traceback" not in said
    until(lambda: not psutil.pid_exists(int(note.read_text())), seconds=20)


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
