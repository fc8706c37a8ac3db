"""Rendering the site strictly: every warning is an error, and no warning is forgotten by the next build."""

import gc
import sys
from types import SimpleNamespace
from typing import NoReturn

import psutil

from kvbook import UserError, fingerprint, paths
from kvbook.runs import records


def check_name() -> None:
    """Refuse a build folder of another name than the one that Jupyter Book always adds itself."""
    if paths.BUILD.name != "_build":
        raise UserError(f"KVBOOK_BUILD must name a folder called _build, not {paths.BUILD}")


def build_html() -> None:
    """Render the book into ``_build/html`` with Jupyter Book, in this process, which has read all source already."""
    # Sphinx keeps nearly all that it makes until it ends: looking for garbage among that takes long and finds little.
    gc.disable()
    # The book has no social cards, and what draws them imports matplotlib at each build.
    no_cards = SimpleNamespace(create_social_card=None, DEFAULT_SOCIAL_CONFIG={})
    sys.modules["sphinxext.opengraph._social_cards"] = no_cards
    from jupyter_book.cli.main import main

    # -n: a reference to nothing is a warning; -W: a warning is an error; --keep-going: name them all at once.
    # -q: warnings and the result, not Sphinx's whole configuration.
    options = ["--path-output", str(paths.BUILD.parent), "-n", "-W", "--keep-going", "-q"]
    unfinished = paths.BUILD / ".site.unfinished"
    with records.alone(paths.BUILD / ".site.lock", "renders this book"):
        if unfinished.exists():
            # Sphinx warns only about pages that it reads, and copies pictures only of those that it writes: the next
            # build would pass in silence over the same faults, and leave out what a killed one had not copied.
            (paths.BUILD / ".doctrees" / "environment.pickle").unlink(missing_ok=True)
        unfinished.touch()
        try:
            main(["build", str(paths.ROOT), *options], standalone_mode=False)
        except (Exception, SystemExit) as error:
            _say_why(error)
        unfinished.unlink()
    print(f"The book is in {paths.HTML / 'index.html'}", flush=True)


def _say_why(error: BaseException) -> NoReturn:
    """End in one line below what Sphinx has written."""
    # What Jupyter Book ends with: a status, what interrupted Sphinx, or our own line.
    code = getattr(error, "code", None)
    if isinstance(code, KeyboardInterrupt):
        raise code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # This process then has the old code, and the notebooks may be new.
    files = (file for folder in fingerprint.PACKAGES.values() for file in folder.rglob("*.py"))
    began = psutil.Process().create_time()
    edited = next((f"; {file.name} was edited meanwhile" for file in files if file.stat().st_mtime > began), "")
    raise UserError(f"the site was not built: see the warnings and errors above{edited}") from None
