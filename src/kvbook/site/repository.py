"""Who wrote the book, from CITATION.cff; and where it lives, if that is known.

An address is never written down here: on GitHub's machines the environment names the repository, in a clone
its remote ``origin`` does, and without either the pages simply have no repository buttons.
"""

import os
import re
import subprocess
from datetime import date
from pathlib import Path

import yaml
from sphinx.application import Sphinx
from sphinx.config import Config

# Where the site will be served, for canonical links and previews; the publishing workflow knows it.
SITE_VARIABLE = "KVBOOK_SITE_URL"

# The hosts whose addresses for "edit" and "new issue" the theme knows.
_HOSTS = ("github.com", "gitlab.com")

# https://host/owner/name(.git), with or without credentials; git@host:owner/name.git;
# ssh://git@host/owner/name.git
_REMOTE = re.compile(
    r"^(?:https?://|ssh://)?(?:[^@/]+@)?(?P<host>[\w.-]+)(?::\d+)?[:/](?P<path>[\w.-]+/[\w./-]+?)(?:\.git)?/?$"
)


def connect(app: Sphinx) -> None:
    """Join the build before the theme looks at its options."""
    app.connect("config-inited", _set_authors, priority=100)
    app.connect("config-inited", _set_repository, priority=100)


def web_address(remote: str) -> str | None:
    """Turn a git remote into the address of its pages.

    Parameters
    ----------
    remote
        As ``git remote get-url`` prints it.

    Returns
    -------
    str or None
        Never with credentials; None when the host is none whose pages the theme knows.
    """
    match = _REMOTE.match(remote.strip())
    if match is None or match["host"] not in _HOSTS:
        return None
    return f"https://{match['host']}/{match['path']}"


def find_repository(folder: Path) -> tuple[str, str] | None:
    """Find where a checkout comes from.

    Parameters
    ----------
    folder
        The checkout.

    Returns
    -------
    tuple of str or None
        Address and branch.
    """
    if named := os.environ.get("GITHUB_REPOSITORY"):
        server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
        return f"{server}/{named}", os.environ.get("GITHUB_REF_NAME", "main")
    address = web_address(_git(folder, "remote", "get-url", "origin") or "")
    if address is None:
        return None
    head = _git(folder, "symbolic-ref", "--short", "refs/remotes/origin/HEAD")
    return address, head.removeprefix("origin/") if head else "main"


def _git(folder: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _set_authors(app: Sphinx, config: Config) -> None:
    citation = yaml.safe_load((Path(app.srcdir) / "CITATION.cff").read_text("utf-8"))
    names = [
        author.get("name") or f"{author['given-names']} {author['family-names']}" for author in citation["authors"]
    ]
    config.author = ", ".join(names)
    released = citation.get("date-released")
    config.copyright = str(released.year if isinstance(released, date) else date.today().year)


def _set_repository(app: Sphinx, config: Config) -> None:
    options = config.html_theme_options
    # Jupyter Book's own default would send readers to Jupyter Book's repository.
    options.pop("repository_url", None)
    if (found := find_repository(Path(app.srcdir))) is not None:
        options["repository_url"], options["repository_branch"] = found
        options["use_repository_button"] = options["use_issues_button"] = options["use_edit_page_button"] = True
    if address := os.environ.get(SITE_VARIABLE):
        config.html_baseurl = config.ogp_site_url = address.rstrip("/") + "/"
