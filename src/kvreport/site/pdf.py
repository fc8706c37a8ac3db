"""Every chapter as a PDF, printed from its page by a browser, when ``KVBOOK_PDF`` asks for it (``make pdf``)."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sphinx.application import Sphinx

from kvbook import UserError, refusing

FOLDER = "pdf"

_TIMEOUT_S = 120


def wanted() -> bool:
    """Whether PDFs are to be made, and pages are to offer them."""
    return bool(os.environ.get("KVBOOK_PDF"))


def find_browser() -> str:
    """Find a Chromium."""
    for name in (os.environ.get("KVBOOK_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and (found := shutil.which(name)):
            return found
    raise UserError("no Chromium to print PDFs with: install it, or name one in KVBOOK_CHROMIUM")


def print_page(page: Path, file: Path) -> None:
    """Print one page."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvbook-") as profile:
        command = [find_browser(), "--headless", "--disable-gpu", f"--user-data-dir={profile}"]
        # It visits only our own page, from a file; in a container it has no sandbox to use.
        command += ["--no-sandbox", "--disable-background-networking", "--no-pdf-header-footer"]
        command += ["--virtual-time-budget=5000", f"--print-to-pdf={file}", page.resolve().as_uri()]
        late = f"the browser did not print {page.name} within {_TIMEOUT_S} s"
        with refusing(late, subprocess.TimeoutExpired):
            made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if made.returncode != 0 or not file.is_file():
        last = (made.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the browser did not print {page.name}: {last}")


def print_chapters(app: Sphinx, exception: Exception | None) -> None:
    """Print the chapters whose pages have changed."""
    if exception is not None or app.builder.name != "html" or not wanted():
        return
    site = Path(app.outdir)
    try:
        for chapter in app.kvbook_chapters.values():
            page, file = site / "chapters" / f"{chapter.stem}.html", site / FOLDER / f"{chapter.stem}.pdf"
            # A page that is older than its PDF has not changed since.
            if not file.is_file() or file.stat().st_mtime_ns < page.stat().st_mtime_ns:
                print_page(page, file)
    except UserError as error:
        raise SystemExit(f"kvbook: {error}") from None
