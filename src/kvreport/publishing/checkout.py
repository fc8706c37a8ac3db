"""Who wrote the book, from CITATION.cff; and where it lives, if that is known.

The address of the repository is CITATION.cff's ``repository-code``.  Where that is left out, the environment names it
on GitHub's machines, and a clone's remote ``origin`` elsewhere; without any of these there is none.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from kvbook.settings import read_yaml

# https://host/owner/name(.git), with or without credentials; git@host:owner/name.git;
# ssh://git@host/owner/name.git; of the hosts whose addresses for "edit" and "new issue" the theme knows.
_REMOTE = re.compile(
    r"^(?:https?://|ssh://)?(?:[^@/]+@)?(?P<host>git(?:hub|lab)\.com)(?::\d+)?"
    r"[:/](?P<path>[\w.-]+/[\w./-]+?)(?:\.git)?/?$"
)


@dataclass(frozen=True)
class Origin:
    """The book as a thing to cite.

    Attributes
    ----------
    title, version : str
        Of the book.
    authors : tuple of str
        A person as "Family, Given", a group by its name in braces, as BibTeX wants them.
    names : tuple of str
        The same as people read them.
    year : int
        Of the release, or this year before there is one.
    doi, site, repository, branch : str or None
        None where nobody knows them; the site's address has a slash at its end.
    """

    title: str
    version: str
    authors: tuple[str, ...]
    names: tuple[str, ...]
    year: int
    doi: str | None = None
    site: str | None = None
    repository: str | None = None
    branch: str | None = None


def of(folder: Path) -> Origin:
    """Read a checkout's CITATION.cff, and find out where it comes from."""
    citation = read_yaml(folder / "CITATION.cff")
    people = citation["authors"]
    repository = citation.get("repository-code") or find_repository(folder)
    released = citation.get("date-released")
    # Where the site will be served, for canonical links, previews and citations; the publishing workflow knows it.
    site = os.environ.get("KVBOOK_SITE_URL", "").strip()
    return Origin(
        title=citation["title"], version=str(citation["version"]), doi=citation.get("doi"),
        authors=tuple(map(_for_bibtex, people)), names=tuple(map(_for_people, people)),
        year=released.year if isinstance(released, date) else date.today().year,
        site=site.rstrip("/") + "/" if site else None,
        repository=repository.rstrip("/").removesuffix(".git") if repository else None,
        branch=os.environ.get("GITHUB_REF_NAME", "main") if repository else None,
    )


def web_address(remote: str) -> str | None:
    """Turn a git remote into the address of its pages."""
    match = _REMOTE.match(remote.strip())
    return f"https://{match['host']}/{match['path']}" if match else None


def find_repository(folder: Path) -> str | None:
    """Find where a checkout comes from."""
    if named := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{named}"
    try:
        command = ["git", "remote", "get-url", "origin"]
        return web_address(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout)
    except FileNotFoundError:
        return None


def _for_people(person: dict[str, str]) -> str:
    return person.get("name") or f"{person['given-names']} {person['family-names']}"


def _for_bibtex(person: dict[str, str]) -> str:
    # Braces keep a group's name whole; BibTeX would take its last word for a family name.
    return f"{{{person['name']}}}" if "name" in person else f"{person['family-names']}, {person['given-names']}"
