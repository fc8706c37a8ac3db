"""A book of one small chapter in its own folder, with this repository's configuration, for tests to build."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvbook.paths import ROOT
from kvreport.running.planning import Folders

STEM = "01_squares"

# The book as a person would write it.
BOOK = Path(__file__).with_name("book")
INDEX = (BOOK / "index.md").read_text("utf-8")
_NOTEBOOK = json.loads((BOOK / "chapters" / f"{STEM}.ipynb").read_text("utf-8"))
CODE = {cell["id"]: "".join(cell["source"]) for cell in _NOTEBOOK["cells"]}
PROSE = CODE["prose"]

# Commands, one after the other in one process, and what is asked of the book then: most of a process's time is spent on
# importing the libraries.
COMMANDS = """
import sys
from kvbook.__main__ import main
*commands, then = sys.argv[1:]
for command in commands:
    sys.argv = ["kvbook", *command.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
exec(then)
"""


def notebook(**sources: str) -> dict:
    """Return the chapter as a notebook; a keyword replaces the source of that cell."""
    cells = [cell | {"source": (CODE | sources)[cell["id"]]} for cell in _NOTEBOOK["cells"]]
    return copy.deepcopy(_NOTEBOOK | {"cells": cells})


def write(root: Path, **sources: str) -> None:
    """Write the chapter's source."""
    (root / "chapters" / f"{STEM}.ipynb").write_text(json.dumps(notebook(**sources), indent=1) + "\n", "utf-8")


def create(root: Path) -> Path:
    """Write the whole book into `root`."""
    shutil.copytree(BOOK, root, dirs_exist_ok=True)
    (root / "pages").mkdir()
    for name in ("_config.yml", "CITATION.cff", "requirements.txt", "pages/figures.md", "pages/environment.md"):
        shutil.copy(ROOT / name, root / name)
    write(root)
    return root


def folders(root: Path) -> Folders:
    """Return the book's folders, for calls in this process."""
    build = root / "_build"
    return Folders(root / "chapters", root / "parameters", root / "data", build / "executed", build / "figures")


def environment(root: Path, **more: str) -> dict[str, str]:
    """Return the environment in which this repository's commands work on the book in `root`."""
    # PYTEST_: ipykernel looks for it and then treats standard error in another way than it does for people.
    ours = ("KVBOOK_", "GITHUB_", "PYTEST_", "PROFILE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"KVBOOK_ROOT": str(root), "KVBOOK_BUILD": str(root / "_build")} | more


def run(root: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the book; standard error comes with standard output, as a person sees them."""
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=environment(root, **more), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=120,
    )


def make_book(root: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Do what `make book` does once everything is installed."""
    return run(root, "-m", "kvbook", "build", **more)


def plain_build(root: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Do what a reader does who knows Jupyter Book and nothing of this repository."""
    return run(root, "-c", "from jupyter_book.cli.main import main; main()", "build", ".", **more)


def built(root: Path, build: Callable[..., subprocess.CompletedProcess[str]] = make_book, **more: str) -> str:
    """Build the book, which must succeed; return what that says."""
    done = build(root, **more)
    assert done.returncode == 0, done.stdout
    return done.stdout


def start(folder: Path, *command: str, env: dict[str, str] | None = None, **options) -> subprocess.Popen[str]:
    """Start a Python in a session of its own, in the book's environment where no other is named."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=env or environment(folder), text=True, start_new_session=True,
        # A shell's background job ignores Ctrl-C, and its children inherit that; the command here must not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **streams,
    )


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait for something to be true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
