"""What goes wrong on real machines: each fault is made, and the next run must come out right."""

import errno
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path

import confined
import forked
import mini_book
import psutil
import pytest

from kvbook import UserError, paths
from kvbook.runs import records


def cheap(units: Path, pause: float = 0) -> records.Run:
    """Run an experiment as cheap as can be: 50 units, whose sum can be checked, each noted in a file as it is made."""

    def measure(writer: records.Writer) -> None:
        for unit in range(50):
            if str(unit) not in writer.done:
                with units.open("a") as file:
                    file.write(f"{unit}\n")
                writer.append(str(unit), [{"unit": unit, "text": "x" * 1000}] * 4)
                time.sleep(pause)

    return records.run("cheap", {"a": 1}, measure)


def is_whole(run: records.Run) -> bool:
    return (run.rows["unit"].sum(), len(run.rows)) == (4 * sum(range(50)), 200)


# Disks


@pytest.mark.parametrize(("number", "remedy"), [
    (errno.ENOSPC, "No space left on device; free some room and run again: what was finished is kept"),
    (errno.EFBIG, "raise the limit on the size of files and run again: what was finished is kept"),
    (errno.EROFS, "Read-only file system; mount it for writing, or name another folder in KVBOOK_BUILD"),
    (errno.EDQUOT, "free some of your quota"),
    (errno.EACCES, "allow it, or name another folder"),
])
def test_what_keeps_results_from_being_written_is_one_line_and_control_another_error_is_not(tmp_path, number, remedy):
    with pytest.raises(UserError, match=remedy), records.writable(tmp_path):
        raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="exists"), records.writable(tmp_path):
        raise OSError(errno.EEXIST, "exists")


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_book_that_cannot_be_written_ends_in_one_line_and_no_page(tmp_path, fault):
    root = mini_book.create(tmp_path / "book")
    (root / "_build").mkdir()
    done = confined.run(
        [sys.executable, "-m", "kvbook", "build"], disk=root / "_build", size="100k", read_only=fault == "read-only",
        cwd=root, env=mini_book.environment(root), after=f"find '{root / '_build'}' -name '*.html'",
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("kvbook: ")]
    assert any(("No space left" if fault == "full" else "Read-only") in line for line in said), done.stdout
    assert ".html" not in done.stdout


# Several at once, and what is killed


def test_two_processes_that_want_one_run_make_it_once(runs, tmp_path, capfd):
    ended, whole = forked.both(lambda: str(is_whole(cheap(tmp_path / "units", 0.02))))
    assert (ended, whole) == ([0, 0], {"True"})
    assert (tmp_path / "units").read_text().split() == list(map(str, range(50)))
    assert capfd.readouterr().err.count("kvbook: waiting for another process that makes cheap/") == 1


def test_a_killed_run_holds_no_lock_and_goes_on_after_its_last_whole_unit(runs, tmp_path, capfd):
    units = tmp_path / "units"
    process = forked.start(lambda: cheap(units, 0.05))
    mini_book.until(lambda: units.is_file() and len(units.read_text().split()) >= 3)
    process.kill()
    process.join()
    assert list(runs.rglob(".*.lock"))
    begun = len(units.read_text().split())
    assert is_whole(cheap(units))
    assert int(units.read_text().split()[begun]) in (begun - 1, begun)
    assert "waiting" not in capfd.readouterr().err


def counting_book(tmp_path: Path, seconds: float) -> Path:
    """Make a book whose chapter notes each kernel that executes it, and takes its time."""
    root = mini_book.create(tmp_path / "book")
    note = f"import os, time\nopen({str(tmp_path / 'kernels')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    mini_book.write(root, run=f"{mini_book.CODE['run']}{note}time.sleep({seconds})\n")
    return root


def test_two_make_books_at_once_execute_a_chapter_once_and_later_edits_reach_the_page_and_execute_nothing(tmp_path):
    root = counting_book(tmp_path, 3)
    both = [mini_book.start(root, "-m", "kvbook", "build") for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len((tmp_path / "kernels").read_text().splitlines()) == 1
    assert sum("kvbook: waiting for another process that executes chapter 01_squares" in text for text in said) == 1
    page = root / "_build" / "html" / "chapters" / "01_squares.html"
    assert page.is_file()

    notebook = root / "chapters" / f"{mini_book.STEM}.ipynb"
    notebook.write_text(notebook.read_text().replace("# Squares", "# Squares\\n\\nA late remark."))
    (root / "index.md").write_text(mini_book.INDEX + "\nAnother remark.\n")
    # Whatever the clock says.
    for file in (notebook, root / "index.md"):
        os.utime(file, (1, 1))
    assert "chapter 1 of 1" not in mini_book.built(root)
    assert len((tmp_path / "kernels").read_text().splitlines()) == 1
    assert "A late remark" in page.read_text()
    assert "the last square is 3.00" in page.read_text()
    assert "Another remark" in (root / "_build" / "html" / "index.html").read_text()


def test_a_make_book_that_was_killed_leaves_no_copy_and_no_kernel_and_the_next_one_gives_the_book(tmp_path):
    root = counting_book(tmp_path, 600)
    process = mini_book.start(root, "-m", "kvbook", "build")
    kernels = tmp_path / "kernels"
    mini_book.until(lambda: kernels.is_file() and kernels.read_text())
    process.kill()
    process.communicate()
    assert not list((root / "_build").glob(f"executed/{mini_book.STEM}.ipynb"))
    assert not list((root / "_build").glob(f"figures/{mini_book.STEM}"))
    assert not (root / "_build" / "html").exists()
    mini_book.until(lambda: not psutil.pid_exists(int(kernels.read_text())), seconds=20)
    mini_book.write(root)
    mini_book.built(root)
    assert "3.00" in (root / "_build" / "html" / "chapters" / "01_squares.html").read_text()


# No network


def test_without_any_network_chapters_run_and_the_book_is_rendered(tmp_path):
    # The control: in there not even this machine's own resolver or a public address can be reached.
    lone = "import socket; socket.create_connection(('192.0.2.1', 53), timeout=3)"
    assert "Network is unreachable" in confined.run([sys.executable, "-c", lone], network=False).stdout
    with socket.create_server(("127.0.0.1", 0)) as ours:
        inside = f"import socket; socket.create_connection({ours.getsockname()!r}, timeout=3)"
        assert confined.run([sys.executable, "-c", inside], network=False).returncode != 0

    root = mini_book.create(tmp_path / "book")
    # A chapter of this book's own, with the stand-ins that ship, and without being told that it is offline.
    chapter = shutil.copy(paths.ROOT / "chapters" / "09_blog_past.ipynb", root / "chapters")
    for other in set(re.findall(r"\{doc\}`(\w+)`", Path(chapter).read_text("utf-8"))):
        (root / "chapters" / f"{other}.md").write_text(f"# {other}\n")
    (root / "parameters" / "few.yaml").write_text("09_blog_past: {families: [], quantizations: [none], n_samples: 2}\n")
    for folder in ("models", "documents", "runs", "evidence.yaml"):
        (root / "data" / folder).symlink_to(paths.ROOT / "data" / folder)
    shutil.copy(paths.ROOT / "references.bib", root)
    (root / "index.md").write_text(mini_book.INDEX + "\n```{bibliography}\n```\n")
    env = mini_book.environment(root, PROFILE="few", JOBS="1", HF_HOME=str(tmp_path / "empty"))
    env = {name: value for name, value in env.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    done = confined.run([sys.executable, "-m", "kvbook", "build"], network=False, cwd=root, env=env)
    assert done.returncode == 0, done.stdout
    assert "fig-past-variants" in (root / "_build" / "html" / "chapters" / "09_blog_past.html").read_text()
    assert (root / "_build" / "html" / "chapters" / "01_squares.html").is_file()
