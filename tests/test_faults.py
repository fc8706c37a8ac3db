"""What goes wrong on real machines: each fault is made, and the next run must come out right."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path

import confined
import mini_book
import psutil
import pytest

from kvbook import paths
from kvbook.errors import UserError
from kvbook.models import loading
from kvbook.paths import ROOT
from kvbook.runs import records
from kvreport.running import execution, planning

# An experiment as cheap as can be: 50 units, whose sum a reader can check.
EXPERIMENT = """
import sys, time
from kvbook.runs import records
from kvbook.errors import UserError
def measure(writer):
    for unit in range(50):
        if str(unit) not in writer.done:
            print("unit", unit, flush=True)
            writer.append(str(unit), [{"unit": unit, "text": "x" * 1000}] * 4)
            time.sleep(float(sys.argv[1]))
try:
    run = records.run("cheap", {"a": 1}, measure)
    print("sum", run.rows["unit"].sum(), "rows", len(run.rows))
except UserError as error:
    sys.exit(f"kvbook: {error}")
"""
WHOLE = f"sum {4 * sum(range(50))} rows 200"


@pytest.fixture
def experiment(tmp_path):
    script = tmp_path / "experiment.py"
    script.write_text(textwrap.dedent(EXPERIMENT))
    (tmp_path / "build").mkdir()
    return script


def command(script: Path, pause: float = 0) -> list[str]:
    return [sys.executable, str(script), str(pause)]


def environment(script: Path) -> dict[str, str]:
    return os.environ | {"KVBOOK_BUILD": str(script.parent / "build")}


def one_line(output: str, message: str) -> None:
    last = output.strip().splitlines()[-1]
    assert last.startswith("kvbook: ")
    assert message in last
    assert "Traceback" not in output


def until(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# Disks


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_room(experiment):
    again = f"mount -o remount,size=8m '{experiment.parent / 'build'}'; '{sys.executable}' '{experiment}' 0"
    done = confined.run(
        command(experiment), disk=experiment.parent / "build", size="100k", env=environment(experiment), after=again
    )
    assert done.returncode == 1
    first, full, second = done.stdout.partition("kvbook: cannot write results to ")
    assert full
    assert "No space left on device; free some room and run again: what was finished is kept" in second.splitlines()[0]
    assert second.strip().splitlines()[-1] == WHOLE
    assert "Traceback" not in done.stdout
    begun = [line.split()[1] for line in first.splitlines()]
    went_on = [line.split()[1] for line in second.splitlines() if line.startswith("unit")]
    # The one that found no room is done again, and no other.
    assert begun + went_on[1:] == [str(unit) for unit in range(50)]
    assert len(begun) > 3


def test_a_limit_on_the_size_of_files_ends_in_one_line_too(experiment):
    limited = ["sh", "-c", 'ulimit -f 40; trap "" XFSZ; exec "$@"', "sh", *command(experiment)]
    done = subprocess.run(limited, env=environment(experiment), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    one_line(done.stderr, "raise the limit on the size of files and run again")
    again = subprocess.run(
        command(experiment), env=environment(experiment), capture_output=True, text=True, check=False
    )
    assert again.stdout.strip().splitlines()[-1] == WHOLE


def test_a_read_only_results_folder_ends_in_one_line(experiment):
    done = confined.run(
        command(experiment), disk=experiment.parent / "build", read_only=True, env=environment(experiment)
    )
    assert done.returncode == 1
    one_line(done.stdout, "Read-only file system; mount it for writing, or name another folder in KVBOOK_BUILD")


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_book_that_cannot_be_written_ends_in_one_line_and_no_page(tmp_path, fault):
    root = mini_book.create(tmp_path / "book")
    (root / "_build").mkdir()
    done = confined.run(
        [sys.executable, "-m", "kvbook", "build"],
        disk=root / "_build",
        size="100k",
        read_only=fault == "read-only",
        cwd=root,
        env=mini_book.environment(root),
        after=f"find '{root / '_build'}' -name '*.html'",
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("kvbook: ")]
    assert any(("No space left" if fault == "full" else "Read-only") in line for line in said), done.stdout
    assert ".html" not in done.stdout


# Several at once


def test_two_processes_that_want_one_run_make_it_once(experiment):
    both = [
        subprocess.Popen(
            command(experiment, 0.02),
            env=environment(experiment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    lines = [line for said, _ in outputs for line in said.splitlines()]
    assert lines.count(WHOLE) == 2
    assert sorted(line for line in lines if line.startswith("unit")) == sorted(f"unit {unit}" for unit in range(50))
    assert sum(noted.count("kvbook: waiting for another process that makes cheap/") for _, noted in outputs) == 1


def test_a_killed_holder_of_a_lock_holds_it_no_longer(experiment):
    process = subprocess.Popen(command(experiment, 1), env=environment(experiment), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "unit 0\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert list((experiment.parent / "build").rglob(".*.lock"))
    again = subprocess.run(
        command(experiment), env=environment(experiment), capture_output=True, text=True, check=False
    )
    assert again.stdout.strip().splitlines()[-1] == WHOLE
    assert "waiting" not in again.stderr


def counting_book(tmp_path: Path, seconds: float) -> Path:
    """Make a book whose chapter notes each time that it is executed, and takes its time."""
    root = mini_book.create(tmp_path / "book")
    note = f"import time\nwith open({str(tmp_path / 'times')!r}, 'a') as file:\n    file.write('x')\ntime.sleep({seconds})\n"
    mini_book.write(root, run=mini_book.CODE["run"] + note)
    return root


def start_book(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvbook", "build"],
        cwd=root, env=mini_book.environment(root), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )


def test_two_make_books_at_once_execute_a_chapter_once_and_both_give_the_book(tmp_path):
    root = counting_book(tmp_path, 3)
    both = [start_book(root), start_book(root)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert (tmp_path / "times").read_text() == "x"
    assert sum("kvbook: waiting for another process that executes chapter 01_squares" in text for text in said) == 1
    assert (root / "_build" / "html" / "chapters" / "01_squares.html").is_file()


def test_a_make_book_that_was_killed_is_followed_by_one_that_gives_the_book(tmp_path):
    root = counting_book(tmp_path, 600)
    process = start_book(root)
    until(lambda: (tmp_path / "times").is_file())
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert not (root / "_build" / "executed" / f"{mini_book.STEM}.ipynb").exists()
    assert not (root / "_build" / "html").exists()
    psutil.wait_procs(children, timeout=30)
    mini_book.write(root)
    done = mini_book.make_book(root)
    assert done.returncode == 0, done.stdout
    assert "3.00" in (root / "_build" / "html" / "chapters" / "01_squares.html").read_text()


# Files that are not what they should be


def test_damaged_weights_are_one_line(llama_folder, tmp_path):
    folder = shutil.copytree(llama_folder, tmp_path / "damaged")
    (weights,) = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    loading.load(str(folder))
    for harm in (bytes(content[: len(content) // 2]), b"\xff" * 100 + bytes(content[100:]), b""):
        weights.write_bytes(harm)
        with pytest.raises(UserError, match="weights") as caught:
            loading.load(str(folder))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("harm", ["[]", "null", "{}", "\x00" * 50, '{"rows_sha256": 3}', ""])
def test_a_damaged_run_json_is_one_line(experiment, harm):
    subprocess.run(command(experiment), env=environment(experiment), capture_output=True, check=True)
    (file,) = (experiment.parent / "build").rglob("run.json")
    file.write_text(harm)
    done = subprocess.run(command(experiment), env=environment(experiment), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    one_line(done.stderr, "delete the folder and run again")


@pytest.mark.parametrize("harm", ["", "{", '{"unit": "0"}\n', "\x00" * 80, "[1]\n"])
def test_a_damaged_journal_costs_units_and_never_rows(experiment, harm):
    process = subprocess.Popen(
        command(experiment, 0.05), env=environment(experiment), stdout=subprocess.PIPE, text=True
    )
    for _ in range(4):
        process.stdout.readline()
    process.kill()
    process.communicate()
    (journal,) = (experiment.parent / "build").rglob("journal.jsonl")
    kept = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(kept[:2]) + harm)
    again = subprocess.run(
        command(experiment), env=environment(experiment), capture_output=True, text=True, check=False
    )
    assert again.stdout.strip().splitlines()[-1] == WHOLE
    assert again.stdout.splitlines()[0] == "unit 2"


def test_a_chapter_without_its_parameters_cell_is_refused_before_it_runs(tmp_path):
    root = mini_book.create(tmp_path)
    file = root / "chapters" / f"{mini_book.STEM}.ipynb"
    notebook = json.loads(file.read_text())
    for cell in notebook["cells"]:
        cell["metadata"] = {}
    file.write_text(json.dumps(notebook))
    (chapter,) = planning.plan("default", mini_book.folders(root))
    with pytest.raises(UserError, match="no cell tagged parameters") as caught:
        execution.execute(chapter, out=io.StringIO())
    assert mini_book.STEM in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (root / "_build").exists()


# Clocks


def test_a_clock_that_goes_backwards_changes_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    times = iter([datetime(2031, 1, 1, tzinfo=UTC), datetime(1999, 1, 1, tzinfo=UTC)])
    monkeypatch.setattr(records, "_now", lambda: next(times).isoformat())
    run = records.run("e", {"a": 1}, lambda w: w.append("u", [{"x": 1}]))
    assert run.about["started"] > run.about["finished"]
    again = records.run("e", {"a": 1}, lambda w: pytest.fail("measured again"))
    assert again.rows["x"].tolist() == [1]


def test_after_the_clock_went_backwards_an_edit_still_reaches_the_page(tmp_path):
    root = mini_book.create(tmp_path / "book")
    assert mini_book.make_book(root).returncode == 0
    mini_book.write(root, prose=mini_book.PROSE + "\nA late remark.\n")
    (root / "index.md").write_text(mini_book.INDEX + "\nAnother remark.\n")
    for file in (root / "chapters" / f"{mini_book.STEM}.ipynb", root / "index.md"):
        os.utime(file, (1, 1))
    done = mini_book.make_book(root)
    assert done.returncode == 0, done.stdout
    assert "A late remark" in (root / "_build" / "html" / "chapters" / "01_squares.html").read_text()
    assert "Another remark" in (root / "_build" / "html" / "index.html").read_text()


# No network


def test_without_any_network_chapters_run_and_the_book_is_rendered(tmp_path):
    # The control: in there not even this machine's own resolver or a public address can be reached.
    lone = "import socket; socket.create_connection(('192.0.2.1', 53), timeout=3)"
    control = confined.run([sys.executable, "-c", lone], network=False)
    assert control.returncode != 0
    assert "Network is unreachable" in control.stdout
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", 0))
        ours.listen()
        inside = f"import socket; socket.create_connection({ours.getsockname()!r}, timeout=3)"
        assert confined.run([sys.executable, "-c", inside], network=False).returncode != 0

    root = mini_book.create(tmp_path / "book")
    # A chapter of this book's own, with the stand-ins that ship, and without being told that it is offline.
    chapter = shutil.copy(ROOT / "chapters" / "09_blog_past.ipynb", root / "chapters")
    for other in set(re.findall(r"\{doc\}`(\w+)`", Path(chapter).read_text("utf-8"))):
        (root / "chapters" / f"{other}.md").write_text(f"# {other}\n")
    (root / "parameters" / "few.yaml").write_text("09_blog_past: {families: [], quantizations: [none], n_samples: 2}\n")
    for folder in ("models", "documents", "runs", "evidence.yaml"):
        (root / "data" / folder).symlink_to(ROOT / "data" / folder)
    shutil.copy(ROOT / "references.bib", root)
    (root / "index.md").write_text(mini_book.INDEX + "\n```{bibliography}\n```\n")
    env = mini_book.environment(root, PROFILE="few", HF_HOME=str(tmp_path / "empty"))
    env = {name: value for name, value in env.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    done = confined.run([sys.executable, "-m", "kvbook", "build"], network=False, cwd=root, env=env)
    assert done.returncode == 0, done.stdout
    assert "fig-past-variants" in (root / "_build" / "html" / "chapters" / "09_blog_past.html").read_text()
    assert (root / "_build" / "html" / "chapters" / "01_squares.html").is_file()
