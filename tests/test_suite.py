"""The suite itself: a slow test says that it is one, and what is left out is named."""

import os
import re
import subprocess
import sys

import pytest
import suite_rules

from kvbook.paths import ROOT

SAMPLE = """
import subprocess, sys
import pytest

def test_light():
    pass

def test_starts_a_process_and_does_not_say_so():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.slow
def test_says_so():
    raise AssertionError("left out")
"""


@pytest.mark.slow
def test_control_a_process_without_the_mark_is_a_fault_and_what_is_left_out_is_counted(tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-n", "1", "-m", "not slow"]
    done = subprocess.run(
        [*command, "test_sample.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "this test has started ['python" in done.stdout
    assert re.search(r"= 2 passed, (\d+ warnings?, )?1 error", done.stdout)
    assert suite_rules.line({"test_sample": 1}) in done.stdout


def test_every_file_that_is_named_is_there():
    names = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    assert {*suite_rules.FILES, *suite_rules.LONGEST_FIRST} <= names


def test_python_and_browsers_are_watched_and_small_tools_are_not():
    assert suite_rules.watched([sys.executable, "/usr/bin/chromium", "git", "lscpu"]) == [
        sys.executable.rpartition("/")[2],
        "chromium",
    ]
