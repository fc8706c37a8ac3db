"""What changed since the first release: the release notes of CHANGELOG.md, newest first, as a page of the site."""

import re
from itertools import takewhile

from kvbook import paths
from kvreport.publishing import checkout

SOURCE = "CHANGELOG.md"


def markdown() -> str:
    """Write the notes of every release after the first; links lead to where their files are."""
    _, *releases = re.split(r"^(?=## )", (paths.ROOT / SOURCE).read_text("utf-8"), flags=re.MULTILINE)
    book = checkout.of(paths.ROOT)

    def link(found: re.Match[str]) -> str:
        words, to = found.groups()
        if to.startswith("pages/"):
            return f"[{words}]({to.removeprefix('pages/')})"
        return f"[{words}]({book.repository}/blob/{book.branch}/{to})" if book.repository else f"{words} (`{to}`)"

    newer = takewhile(lambda release: not release.startswith("## 0.1.0"), releases)
    return re.sub(r"\[([^\]]+)\]\(([^):]+)\)", link, "".join(newer))
