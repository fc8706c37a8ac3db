"""CONTRIBUTING's "To add a chapter", followed to the letter in a copy of the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from kvbook.paths import ROOT

# "... in `path`:" above a fenced block; the notebook's is a script that makes it.
BLOCK = re.compile(
    r"`((?:src|chapters|tests)/[\w./]+)`[^\n]*:\n\n```(\w+)( notebook)?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copy the checkout without its chapters' notebooks, and add the chapter."""
    root = tmp_path_factory.mktemp("checkout") / "book"
    left_out = shutil.ignore_patterns("_build", ".*", "*.ipynb", "*.egg-info", "__pycache__", "data")
    shutil.copytree(ROOT, root, ignore=left_out)
    (root / "data").symlink_to(ROOT / "data")
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for name, _, notebook, content in BLOCK.findall(guide[guide.index("## To add a chapter") :]):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if notebook:
            made: dict = {}
            exec(content, made)
            content = json.dumps(made["notebook"], indent=1) + "\n"
        path.write_text(content, "utf-8")
    return root


@pytest.fixture
def run(checkout):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVBOOK_", "PYTEST_"))}
    environment = clean | {
        "PYTHONPATH": os.pathsep.join([str(checkout / "src"), os.environ["PYTHONPATH"]]),
        "KVBOOK_ROOT": str(checkout),
        "KVBOOK_BUILD": str(checkout / "_build"),
        "PROFILE": "smoke",
    }
    return lambda *command: subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def test_a_chapter_is_ten_files_or_fewer(checkout):
    files = [*(checkout / "src/kvreport/chapters/cache_bytes").iterdir(), *(checkout / "chapters").iterdir()]
    assert 8 <= len([*files, checkout / "tests/test_cache_bytes.py"]) <= 10


def test_the_new_chapter_is_executed(run, checkout):
    done = run("-m", "kvbook", "build", "13_cache_bytes")
    assert done.returncode == 0, done.stderr
    assert "13_cache_bytes: done after" in done.stderr
    executed = nbformat.read(checkout / "_build/executed/13_cache_bytes.ipynb", as_version=4)
    assert "fig-cache-bytes" in json.dumps(executed)
    assert (checkout / "_build/figures/13_cache_bytes/fig-cache-bytes.svg").is_file()


def test_its_experiment_is_found_by_name(run):
    done = run("-m", "kvbook", "run", "cache_bytes", "lengths=4,8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 rows in ")


def test_its_own_tests_pass_and_the_rules_for_notebooks_and_imports_hold(run):
    files = ("tests/test_cache_bytes.py", "tests/test_notebooks.py", "tests/test_imports.py")
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
