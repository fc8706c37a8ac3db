"""Rendering the site strictly: every warning is an error, and no warning is forgotten by the next build."""

import subprocess
import sys

from kvbook import paths
from kvbook.errors import UserError
from kvbook.runs import records


def check_name() -> None:
    """Refuse a build folder of another name than the one that Jupyter Book always adds itself."""
    if paths.BUILD.name != "_build":
        raise UserError(f"KVBOOK_BUILD must name a folder called _build, not {paths.BUILD}")


def build_html() -> None:
    """Render the book into ``_build/html`` with Jupyter Book."""
    # This interpreter's Jupyter Book, whatever PATH says; the package has no __main__ of its own. It keeps nearly all
    # that it makes until it ends: looking for garbage among that, meanwhile and at the end, takes long and finds
    # little.
    command = [
        sys.executable,
        "-c",
        "import atexit, gc; gc.disable(); atexit.register(gc.freeze); from jupyter_book.cli.main import main; main()",
        "build",
        str(paths.ROOT),
    ]
    command += ["--path-output", str(paths.BUILD.parent)]
    # -n: a reference to nothing is a warning; -W: a warning is an error; --keep-going: name them all at once.
    # -q: warnings and the result, not Sphinx's whole configuration.
    command += ["-n", "-W", "--keep-going", "-q"]
    with records.alone(paths.BUILD / ".site.lock", "renders this book"):
        finished = subprocess.run(command, check=False)
    if finished.returncode != 0:
        # Sphinx warns only about pages that it reads, so the next build would pass in silence over the same
        # faults.
        (paths.BUILD / ".doctrees" / "environment.pickle").unlink(missing_ok=True)
        raise UserError("the site was not built: see the warnings and errors above")
    print(f"The book is in {paths.HTML / 'index.html'}", flush=True)
