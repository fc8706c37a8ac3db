"""The process that executes a chapter, begun by itself or forked from one that has imported the libraries."""

import gc
import io
import json
import signal
import sys
from pathlib import Path

import mini_book
import psutil
import pytest
from test_execution import start, until

from kvreport.running import execution, planning

CELL = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}


@pytest.fixture
def root(tmp_path):
    return mini_book.create(tmp_path)


def printed(root: Path, monkeypatch: pytest.MonkeyPatch, forks: bool, *cells: str) -> str:
    """Execute a chapter of these cells and give what they printed, and what they wrote to their error stream."""
    monkeypatch.setattr(execution, "_may_fork", lambda *_: forks)
    notebook = mini_book.notebook()
    # Behind them, so that the first cell is the first of these.
    parameters = notebook["cells"][1]
    notebook["cells"] = [CELL | {"id": f"c{k}", "source": source} for k, source in enumerate(cells)] + [parameters]
    (root / "chapters" / f"{mini_book.STEM}.ipynb").write_text(json.dumps(notebook))
    (chapter,) = execution.bring_up_to_date(planning.plan("default", mini_book.folders(root)), io.StringIO())
    made = json.loads(chapter.executed.read_text())
    outputs = [output for cell in made["cells"] for output in cell["outputs"]]
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


@pytest.mark.parametrize("forks", [False, True])
def test_garbage_is_collected_from_the_end_of_the_first_cell_on_and_what_came_before_is_passed_over(
    root, monkeypatch, forks
):
    first = "import gc\nfirst = gc.isenabled()\nimport pandas\n"
    said = printed(root, monkeypatch, forks, first, "print(first, gc.isenabled(), gc.get_freeze_count())\n")
    in_the_first, behind_it, passed_over = said.split()
    assert (in_the_first, behind_it) == ("False", "True")
    assert int(passed_over) > 50_000
    # Control: a process that nobody has told to collects from its beginning and passes over nothing.
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


# All that a chapter's code could notice but what is imported and which process it is.
SEEN = """
import json, logging, multiprocessing, os, signal, sys
import matplotlib, torch, transformers
variables = {name: value for name, value in os.environ.items() if name not in ("JPY_PARENT_PID", "KVBOOK_PROGRESS")}
variables["KVBOOK_FIGURES"] = os.path.basename(variables["KVBOOK_FIGURES"])
print(json.dumps([
    os.getcwd(), sys.executable, __name__, matplotlib.get_backend(), multiprocessing.get_start_method(),
    torch.get_num_threads(), str(signal.getsignal(signal.SIGINT)), os.getpgid(0) == os.getpid(),
    sorted(variables.items()),
]))
transformers.utils.logging.get_logger("transformers.tests").warning("heard in the notebook")
"""


def test_a_forked_kernel_differs_in_nothing_from_one_begun_by_itself_but_in_what_is_imported(root, monkeypatch):
    imported = "import sys\nprint('transformers' in sys.modules)\n"
    own = printed(root, monkeypatch, False, imported, SEEN)
    forked = printed(root, monkeypatch, True, imported, SEEN + "\n")
    assert own.startswith("False\n")
    assert forked.startswith("True\n")
    assert "heard in the notebook" in own
    assert "heard in the notebook" in forked
    seen = [json.loads(next(line for line in said.splitlines() if line.startswith('["'))) for said in (own, forked)]
    assert seen[0] == seen[1]


FORKED = "from kvreport.running import execution as e, planning\ne._may_fork = lambda *_: True\ne.bring_up_to_date(planning.plan())"


def test_what_a_library_logs_in_a_forked_kernel_is_not_among_the_progress_lines(root):
    log = "import transformers\ntransformers.utils.logging.get_logger('transformers.tests').warning('not here')\n"
    # Control: what is written past Python's own streams does come through.
    mini_book.write(root, table=log + "import os\nos.write(2, b'but this')\n")
    said, _ = start(root, "-c", FORKED).communicate(timeout=60)
    assert "not here" in (root / "_build" / "executed" / f"{mini_book.STEM}.ipynb").read_text()
    assert "but this" in said
    assert "not here" not in said


# What its server has imported is nothing to how a kernel ends.
BARE = f"from kvreport.running import kernel\nkernel.PRELOADED = 'json'\n{FORKED}"


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGINT])
def test_a_forked_kernel_ends_with_the_build(root, tmp_path, harm):
    note = tmp_path / "kernel"
    wait = f"import os, sys, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    mini_book.write(root, table=wait)
    run = start(root, "-c", BARE)
    until(lambda: note.is_file() and note.read_text(), seconds=60)
    kernel = psutil.Process(int(note.read_text()))
    server = kernel.parent()
    assert server.pid != run.pid
    run.send_signal(harm)
    run.communicate(timeout=60)
    until(lambda: not kernel.is_running() and not server.is_running(), seconds=20)


def test_a_forked_kernel_that_dies_is_a_failed_chapter(root, monkeypatch):
    with pytest.raises(execution.ChapterFailed, match=f"chapter {mini_book.STEM} failed: "):
        printed(root, monkeypatch, True, "import os\nos._exit(1)\n")


@pytest.mark.parametrize(
    ("count", "parameters", "forks"),
    [(3, {}, True), (2, {}, False), (3, {"device": "cpu"}, True), (3, {"device": "cuda"}, False)],
)
def test_kernels_are_forked_where_several_chapters_are_executed_on_a_processor(count, parameters, forks):
    chapters = [planning.Chapter(f"{k}", "default", parameters) for k in range(count)]
    assert execution._may_fork(chapters, 2) == (forks and sys.platform == "linux")
