"""CONTRIBUTING's guides, followed to the letter in a copy of the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import mini_book
import nbformat
import pytest

from kvbook.paths import ROOT

GUIDES = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
PATH = r"`((?:src|chapters|tests)/[\w./]+)`"
FENCE = r"```(\w+)( notebook)?\n(.*?)^```$"
# "... in `path`:" above a fenced block is a new file, a notebook by a script that makes it; "Add to `path`:" puts the
# block at its end, in a notebook as a cell; "Add to `NAME` in `path`:" into that list; and "in `path`, `this` becomes
# `that`".
STEP = re.compile(
    rf"(?P<added>Add to (?:`[A-Z]+` in )?)?{PATH}[^\n]*:\n\n{FENCE}|in {PATH}, `([^`]+)` becomes `([^`]+)`",
    re.MULTILINE | re.DOTALL,
)
TITLES = ("To add a chapter", "A sentence with a number", "A figure", "An experiment", "A family of models",
          "A path of the check")

# What a block of a language becomes in a notebook.
CELLS = {"python": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}


def steps(title: str) -> list[re.Match]:
    """List the steps of the guide under a heading."""
    (text,) = re.findall(rf"^##+ {title}\n(.*?)(?=^##|\Z)", GUIDES, re.MULTILINE | re.DOTALL)
    return list(STEP.finditer(text))


def follow(step: re.Match, root) -> None:
    if step[6]:
        path = root / step[6]
        text = path.read_text("utf-8")
        assert text.count(step[7]) == 1, step[0]
        path.write_text(text.replace(step[7], step[8]), "utf-8")
        return
    path, content = root / step[2], step[5]
    path.parent.mkdir(parents=True, exist_ok=True)
    if step[4]:
        made: dict = {}
        exec(content, made)
        content = json.dumps(made["notebook"], indent=1) + "\n"
    if step["added"] and path.suffix == ".ipynb":
        book = json.loads(path.read_text("utf-8"))
        content = json.dumps(book | {"cells": [*book["cells"], CELLS[step[3]](content.strip())]}, indent=1) + "\n"
    elif inside := re.search("`(.+)`", step["added"] or ""):
        entry = textwrap.indent(content, "    ")
        content = re.sub(rf"^{inside[1]} = \(\n.*?(?=^\))", lambda listed: listed[0] + entry, path.read_text("utf-8"),
                         flags=re.MULTILINE | re.DOTALL)
    elif step["added"]:
        content = f"{path.read_text('utf-8')}\n\n{content}"
    path.write_text(content, "utf-8")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, real_model):
    """Copy the checkout without its chapters' notebooks, and follow every guide."""
    root = tmp_path_factory.mktemp("checkout") / "book"
    left_out = shutil.ignore_patterns("_build", ".*", "*.ipynb", "*.egg-info", "__pycache__", "data", "parameters")
    shutil.copytree(ROOT, root, ignore=left_out)
    shutil.copytree(ROOT / "tests/book", root / "tests/book", dirs_exist_ok=True)
    shutil.copy(ROOT / ".gitignore", root)
    # What is changed there, the manifest, is replaced and not written into.
    shutil.copytree(ROOT / "data", root / "data", copy_function=os.symlink)
    (root / "_build").mkdir()
    (root / "_build/models").symlink_to(real_model.parent)
    for title in TITLES:
        for step in steps(title):
            follow(step, root)
    return root


@pytest.fixture(scope="module")
def said(checkout):
    """Build the chapter, run and publish its experiments, try the new path, and run tests, in one process.

    The tests are the chapter's own, the rules for notebooks and imports, and the new path's.
    """
    path = os.pathsep.join([str(checkout / "src"), os.environ["PYTHONPATH"]])
    environment = mini_book.environment(checkout, PYTHONPATH=path, PROFILE="smoke")

    def run(*command: str) -> str:
        done = subprocess.run([*command], cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("git", "init", "-q")
    run("git", "add", ".")
    run("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "A chapter")
    commands = (
        "build 15_cache_bytes", "run cache_bytes lengths=4,8 model=pythia weights=random", "run token_bytes",
        "check llama --thorough --dtypes float32 --samples 1 --tokens 8",
        "atlas llama --paths-only --rows _build/atlas.jsonl", "evidence cache_bytes",
    )
    asked = "from kvreport.publishing import evaluated\nbook = evaluated.published('cache_bytes')\n"
    told = "print(book['numbers'], book['statements']['as-predicted']['outcome'])\n"
    of_page = "from kvreport.site import running\nassert 'reordered cache' in running.paths()\n"
    files = [f"tests/test_{name}.py" for name in ("cache_bytes", "notebooks", "imports", "execution_paths")]
    chosen = ["-v", "-p", "no:cacheprovider", "-k", "not test_execution_paths or reordered", *files]
    of_tests = f"import pytest\nassert not pytest.main({chosen})\n"
    return run(sys.executable, "-c", mini_book.COMMANDS, *commands, asked + told + of_page + of_tests)


def test_a_guide_touches_no_more_files_than_it_says():
    touched = [{step[2] or step[6] for step in steps(title)} for title in TITLES]
    assert list(map(len, touched)) == [8, 1, 2, 4, 1, 2]


def test_the_chapter_is_executed_with_both_figures(said, checkout):
    assert "15_cache_bytes: done after" in said
    executed = nbformat.read(checkout / "_build/executed/15_cache_bytes.ipynb", as_version=4)
    for name in ("fig-cache-bytes", "fig-per-token"):
        assert name in json.dumps(executed)
        assert (checkout / f"_build/figures/15_cache_bytes/{name}.svg").is_file()


def test_both_experiments_and_the_new_family_are_found_by_name(said):
    assert said.count("2 rows in ") == 2


def test_published_its_sentence_has_its_number_and_its_statement_holds(said):
    assert "'PER_TOKEN tokens=16': '46,080'" in said
    assert "} holds\n" in said


def test_its_own_tests_pass_and_the_rules_for_notebooks_and_imports_hold(said):
    for name in ("cache_bytes", "notebooks", "imports"):
        assert re.search(f"^tests/test_{name}.py::.* PASSED", said, re.MULTILINE)


def test_the_new_path_is_in_the_check_the_atlas_and_the_page_and_finds_its_fault(said, checkout):
    assert re.search("^path +reordered cache +(rounding|exact): ", said, re.MULTILINE)
    assert '"reordered cache, drift"' in (checkout / "_build/atlas.jsonl").read_text("utf-8")
    assert len(re.findall("^tests/test_execution_paths.py::.*reordered.* PASSED", said, re.MULTILINE)) == 2
