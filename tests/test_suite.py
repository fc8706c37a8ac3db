"""The suite itself: a slow test says that it is one, and what is left out is named."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import suite_rules

from kvbook import UserError
from kvbook.paths import ROOT
from kvreport.running import planning

SAMPLE = """
import subprocess, sys
import pytest

def test_starts_a_process_and_does_not_say_so():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.slow
def test_says_so():
    raise AssertionError("left out")
"""


def chapters_without_tests_of_their_name(tests: Path, chapters: Iterable[str]) -> list[str]:
    def is_tested(name: str) -> bool:
        taken = re.compile(rf"kvreport\.chapters(\.| import ){name}\b")
        return any(taken.search(file.read_text("utf-8")) for file in tests.glob(f"test_{name}*.py"))

    return [name for name in chapters if not is_tested(name)]


def test_a_chapters_tests_are_found_by_its_name(tmp_path):
    chapters = [chapter.name for chapter in planning.plan()]
    assert len(chapters) == 14
    assert chapters_without_tests_of_their_name(ROOT / "tests", chapters) == []
    # Control: neither another chapter's name nor a file that imports nothing of it is enough.
    (tmp_path / "test_atlas.py").write_text("from kvreport.chapters.models import tables\n")
    assert chapters_without_tests_of_their_name(tmp_path, ["atlas", "models"]) == ["atlas", "models"]


@pytest.mark.slow
def test_control_a_process_without_the_mark_is_a_fault_and_what_is_left_out_is_counted(tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-n", "1", "-m", "not slow"]
    environment = os.environ | {"PYTHONPATH": path, "KVBOOK_TESTS_SHARED": str(tmp_path)}
    done = subprocess.run([*command, "test_sample.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "this test has started ['python" in done.stdout
    assert re.search(r"= 1 passed, (\d+ warnings?, )?1 error", done.stdout)
    assert suite_rules.line({"test_sample": 1}) in done.stdout


def test_every_file_and_test_that_is_named_is_there():
    sources = {path.stem: path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    assert {*suite_rules.FILES, *suite_rules.LONGEST_FIRST} <= sources.keys()
    assert all(f"def {name}(" in sources[file] for file, names in suite_rules.COMPUTE.items() for name in names)


def test_a_users_error_of_two_lines_is_found_by_whatever_test_meets_it():
    with pytest.raises(AssertionError, match="one line"):
        raise UserError("of two\nlines")


def test_python_and_browsers_are_watched_and_small_tools_are_not():
    python = Path(sys.executable).name
    assert suite_rules.watched([sys.executable, "/usr/bin/chromium", "git", "lscpu"]) == [python, "chromium"]
