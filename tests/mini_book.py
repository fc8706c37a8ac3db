"""A book of one small chapter in its own folder, with this repository's configuration, for tests to build."""

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

PROSE = """\
# Squares

The last square stands in {numref}`tab-squares`; see {numref}`fig-squares`.
"""

CAPTIONS = """\
:::{caption} fig-squares
:alt: A line through points.
Thirds of squares.
:::

:::{caption} tab-squares
The rows behind {numref}`fig-squares`.
:::
"""

CODE = {
    "parameters": 'n: int = 4  # how many numbers\nlabel: str = "squares"  # what the line is called\n',
    "run": (
        "import sys\n"
        "import matplotlib.pyplot as plt\n"
        "import pandas as pd\n"
        "from kvbook import progress\n"
        "from kvreport.publishing import page as publish\n"
        "from kvreport.publishing import style\n"
        "\n"
        "style.use()\n"
        'rows = pd.DataFrame({"x": list(progress.track(range(n), label="square"))})\n'
        'rows["y"] = rows["x"] ** 2 / 3\n'
        'print("run by", sys.executable)\n'
    ),
    "figure": (
        f'page = publish.Page("{STEM}")\n'
        "fig, ax = plt.subplots()\n"
        'ax.plot(rows["x"], rows["y"], marker="o", label=label)\n'
        'page.figure(fig, "fig-squares", table=rows)\n'
    ),
    "table": 'page.table(rows, "tab-squares", formats={"y": "{:.2f}"})\n',
    "last": 'print(f"the last square is {rows.y.iloc[-1]:.2f}")\n',
}

INDEX = """\
# A small book

<!-- part: how to cite -->
"""

CONTENTS = """\
format: jb-book
root: index
parts:
  - caption: Chapters
    numbered: true
    chapters:
      - glob: chapters/*
  - caption: About
    chapters:
      - file: pages/figures
      - file: pages/environment
"""


def notebook(prose: str = PROSE, **code: str) -> dict:
    """Return the chapter as a notebook; a keyword replaces the code of that cell."""
    cells = [{"cell_type": "markdown", "id": "prose", "metadata": {}, "source": prose}]
    for name, source in (CODE | code).items():
        cell = {"cell_type": "code", "id": name, "source": source, "outputs": [], "execution_count": None}
        cells.append(cell | {"metadata": {"tags": ["parameters"]} if name == "parameters" else {}})
    cells.append({"cell_type": "markdown", "id": "captions", "metadata": {}, "source": CAPTIONS})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write(root: Path, prose: str = PROSE, **code: str) -> Path:
    """Write the chapter's source; returns its file."""
    path = root / "chapters" / f"{STEM}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook(prose, **code), indent=1) + "\n", "utf-8")
    return path


def create(root: Path) -> Path:
    """Write the whole book into `root`."""
    for folder in ("pages", "parameters", "data"):
        (root / folder).mkdir(parents=True)
    for name in ("_config.yml", "CITATION.cff", "requirements.txt", "pages/figures.md", "pages/environment.md"):
        shutil.copy(ROOT / name, root / name)
    files = {
        "_toc.yml": CONTENTS, "references.bib": "", "index.md": INDEX, "parameters/default.yaml": "# nothing differs\n",
        "parameters/few.yaml": f"{STEM}:\n  n: 3\n", "data/numbers.csv": "x\n1\n",
    }
    for name, text in files.items():
        (root / name).write_text(text)
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
