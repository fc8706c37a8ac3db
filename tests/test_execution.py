"""A chapter runs when something that could change its outputs has; it finishes, or it never happened."""

import contextlib
import importlib.metadata
import io
import json
import os
import shutil
import sys
from pathlib import Path

import mini_book
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from refusing import refusal

from kvbook import paths
from kvreport.running import execution, planning
from kvreport.running import screen as live
from kvreport.running.kernels import Build

SLOW = 'import time\nfor _ in progress.track(range(3), label="sample"):\n    time.sleep(0.5)\n'


@pytest.fixture(scope="module")
def executed_once(tmp_path_factory):
    """Execute a slow chapter where a foreign kernelspec is installed; the book's folder, and what was said."""
    root = mini_book.create(tmp_path_factory.mktemp("executed"))
    foreign = root / "jupyter" / "kernels" / "python3"
    foreign.mkdir(parents=True)
    spec = {"argv": ["/bin/false", "{connection_file}"], "display_name": "Foreign", "language": "python"}
    (foreign / "kernel.json").write_text(json.dumps(spec))
    mini_book.write(root, run=mini_book.CODE["run"] + SLOW)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(root / "jupyter"))
        # The control: whoever asks for "python3" by name gets the foreign one.
        assert KernelSpecManager().get_kernel_spec("python3").argv[0] == "/bin/false"
        for name, seconds in {"BETWEEN_LOOKS": 0.05, "BETWEEN_LINES": 0.1, "WITHOUT_NEWS": 0.2}.items():
            patch.setattr(live, f"SECONDS_{name}", seconds)
        execute(only_chapter(root), said)
    return root, said.getvalue().splitlines()


@pytest.fixture
def root(executed_once, tmp_path):
    return shutil.copytree(executed_once[0], tmp_path / "book")


def only_chapter(root: Path, profile: str = "default") -> planning.Chapter:
    (chapter,) = planning.plan(profile, mini_book.folders(root))
    return chapter


def execute(chapter: planning.Chapter, out: io.StringIO | None = None) -> None:
    assert execution.bring_up_to_date([chapter], out or io.StringIO()) == [chapter]


# What an executed copy holds


def test_the_copy_says_what_made_it(root):
    stored = json.loads(only_chapter(root).executed.read_text())["metadata"]["kvbook"]
    assert stored["profile"] == "default"
    assert stored["duration_s"] > 0
    assert stored["versions"]["torch"] == importlib.metadata.version("torch")
    assert stored["machine"]["device_name"]
    figure = {f"fig-squares.{kind}" for kind in ("svg", "pdf", "png", "csv")}
    assert set(stored["files"]) == figure | {"tab-squares.csv"}


def test_the_own_interpreter_runs_the_chapter_and_progress_never_becomes_an_output(root):
    cells = json.loads(only_chapter(root).executed.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    texts = [output["text"] for output in outputs if output["output_type"] == "stream"]
    assert texts == [f"run by {sys.executable}\n", "the last square is 3.00\n"]


def test_what_an_experiment_reports_is_passed_on_and_a_silent_chapter_still_shows_that_it_runs(executed_once):
    _, lines = executed_once
    assert lines[0] == f"chapter 1 of 1: {mini_book.STEM} (not executed yet)"
    reports = [line for line in lines if "cell 2 of 5  sample 2/3" in line]
    assert len(reports) > 1, "said once more while there was no news"
    assert "done after" in lines[-1]


# What is fresh


CHANGES = {
    "nothing": (lambda root: None, None),
    "dates": (lambda root: [os.utime(file, (1, 1)) for file in root.rglob("*") if file.is_file()], None),
    "prose": (lambda root: mini_book.write(root, prose="# Other words\n", run=mini_book.CODE["run"] + SLOW), None),
    "a note about the data": (lambda root: (root / "data" / "README.md").write_text("What columns mean.\n"), None),
    "code": (lambda root: mini_book.write(root, last="print(0)\n"), "its inputs have changed"),
    "data": (lambda root: (root / "data" / "numbers.csv").write_text("x\n2\n"), "its inputs have changed"),
    "no figure": (lambda root: (only_chapter(root).figures / "fig-squares.svg").unlink(), "fig-squares.svg is missing"),
    "another figure": (
        lambda root: (only_chapter(root).figures / "fig-squares.svg").write_bytes(b""), "missing or not the one it made"
    ),
    "a damaged copy": (lambda root: os.truncate(only_chapter(root).executed, 1000), "its executed copy is damaged"),
}


@pytest.mark.parametrize(("harm", "why"), CHANGES.values(), ids=CHANGES)
def test_a_chapter_is_stale_when_something_that_could_change_its_outputs_has_changed_and_only_then(root, harm, why):
    harm(root)
    before = only_chapter(root).executed.stat().st_mtime_ns
    if why:
        assert why in only_chapter(root).why_stale()
    else:
        assert execution.bring_up_to_date([only_chapter(root)]) == []
        assert only_chapter(root).executed.stat().st_mtime_ns == before


def test_another_version_of_a_library_makes_a_chapter_stale(root, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0" if name == "torch" else version(name))
    # A process looks once.
    monkeypatch.setattr(planning, "versions", planning.versions.__wrapped__)
    assert only_chapter(root).why_stale()


def test_only_modules_that_a_chapter_imports_make_it_stale(root, edit):
    # The site's, another experiment's, and one that an imported module imports.
    for module, fresh in (("kvreport/site/build", True), ("kvbook/measuring/replay", True), ("kvbook/paths", False)):
        edit(module)
        assert (only_chapter(root).why_stale() is None) is fresh


# What is refused


def test_an_unknown_parameter_or_no_cell_of_parameters_is_refused_before_anything_runs(root):
    (root / "parameters" / "few.yaml").write_text(f"{mini_book.STEM}:\n  n_smaples: 3\n")
    before = sorted(root.rglob("*"))
    message = refusal(execute, only_chapter(root, "few"))
    assert "no parameter 'n_smaples'" in message
    assert "n, label" in message
    notebook = root / "chapters" / f"{mini_book.STEM}.ipynb"
    notebook.write_text(notebook.read_text().replace('"parameters"', '"another"'))
    assert f"{mini_book.STEM} has no cell tagged parameters" in refusal(execute, only_chapter(root))
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(("content", "profile", "said"), [
    ("01_sqares:\n  n: 3\n", "few", f"'01_sqares' that does not exist (there are: {mini_book.STEM})"),
    ("{}", "fast", "no parameter set 'fast': there are default, few"),
    ("- a\n", "few", "few.yaml must hold"), (f"{mini_book.STEM}: 3\n", "few", "few.yaml must hold"),
])
def test_a_set_of_parameters_that_is_none_or_of_no_chapter_is_refused(root, content, profile, said):
    (root / "parameters" / "few.yaml").write_text(content)
    assert said in refusal(planning.plan, profile, mini_book.folders(root))


# What fails


@pytest.mark.parametrize(("code", "why"), [
    ('raise ValueError("of two\\nlines")\n', "ValueError: of two lines"),
    ("import os\nos._exit(1)\n", "DeadKernelError: Kernel died"),
])
def test_a_failed_chapter_or_kernel_leaves_a_partial_copy_and_changes_nothing_else(root, monkeypatch, code, why):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    chapter, environment = only_chapter(root), dict(os.environ)
    before = {f: f.read_bytes() for f in (chapter.executed, *sorted(chapter.figures.iterdir()))}
    mini_book.write(root, table=code)
    message = refusal(execute, only_chapter(root))
    assert message.startswith(f"chapter {mini_book.STEM} failed: {why}")
    assert chapter.partial.name in message
    assert chapter.partial.is_file()
    assert {f: f.read_bytes() for f in (chapter.executed, *sorted(chapter.figures.iterdir()))} == before
    assert dict(os.environ) == environment
    # The old copy is of the old code, and says so.
    assert only_chapter(root).why_stale()


def test_a_kernel_keeps_no_names_ends_after_an_edit_and_times_on_usual_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path)
    with contextlib.closing(Build(io.StringIO(), 1)) as build:
        build.timing = True

        def ran(variable: str) -> tuple[str, str, str, str, int]:
            code = "from os import *; print(getpid(), environ['NOTE'], 'hugetlb' in str(environ), 'x' in dir()); x = 1"
            notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
            with build.kernel({"NOTE": variable}, tmp_path) as kernel:
                NotebookClient(notebook, km=kernel).execute()
            return *notebook.cells[0].outputs[0].text.split(), notebook.cells[0].execution_count

        first, second = ran("first"), ran("second")
        assert first[1:] == ("first", "False", "False", 1)
        assert second == (first[0], "second", "False", "False", 1)
        (tmp_path / "new.csv").write_text("")
        # Control: one that times nothing may have large pages.
        build.timing = False
        third = ran("third")
        assert third[0] != first[0]
        assert third[1:] == ("third", "True", "False", 1)
