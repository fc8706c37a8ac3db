"""Compare two builds of the site: visible text by line, data of figures and tables by value.

Run it before and after a change of the code that is to change no result::

    python tools/compare_sites.py old/_build/html _build/html

Figures and tables of the reader's own run differ from build to build, and are left out.  The exit status is 1 where
anything differs.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from bs4 import BeautifulSoup

# What a build makes anew on each machine, by its name and by the headings of its sections.
_OWN_RUN = re.compile(r"(^|-)yours?(-|$)|^tab-run|-here$")
_OWN_SECTIONS = ("Your run", "The run")
_BREAKS = "p h1 h2 h3 h4 li td th figcaption pre dt"


def lines_of(page: Path) -> list[str]:
    """Read the visible lines of a page's article."""
    soup = BeautifulSoup(page.read_bytes(), "html.parser")
    article = soup.find("article") or soup
    for dropped in article.find_all(["script", "style", "svg"]):
        dropped.decompose()
    for section in article.find_all("section"):
        heading = section.find(["h2", "h3"])
        if heading and heading.get_text().strip("#\n ").startswith(_OWN_SECTIONS):
            section.decompose()
    for block in article.find_all(_BREAKS.split()):
        block.append("\n")
    text = article.get_text().replace("#\n", "\n")
    lines = (" ".join(line.split()) for line in text.splitlines())
    # A citation names the build.
    return [line for line in lines if line and not line.startswith("note = {")]


def contents(site: Path) -> dict[str, list[str]]:
    """Read the lines of pages, and of the published data by the name of its figure or table."""
    data = [path for path in site.rglob("*.csv") if not _OWN_RUN.search(path.stem)]
    found = {f"data {path.stem}": path.read_text("utf-8").splitlines() for path in data}
    return found | {f"page {path.relative_to(site)}": lines_of(path) for path in site.rglob("*.html")}


def differences(old: Path, new: Path) -> Iterator[str]:
    """Name what differs between two sites, the lines that left with a minus and those that came with a plus."""
    before, after = contents(old), contents(new)
    # Pages first.
    for name in sorted({*before, *after}, key=lambda name: (name.startswith("data "), name)):
        if name not in before or name not in after:
            yield f"{name}: not in {new if name in before else old}"
        elif changed := [line for line in difflib.ndiff(before[name], after[name]) if line[0] in "+-"]:
            yield "\n".join([f"{name}:", *changed])


def main() -> int:
    """Print the differences, and give the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for site in ("old", "new"):
        parser.add_argument(site, type=Path, help="a folder with index.html")
    given = parser.parse_args()
    for site in (given.old, given.new):
        if not (site / "index.html").is_file():
            print(f"{site} has no index.html: name the folder of a built site", file=sys.stderr)
            return 2
    found = list(differences(given.old, given.new))
    print("\n\n".join(found) or "no difference")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
