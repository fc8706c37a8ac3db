"""What the pages say of authors and address: read by :mod:`kvreport.publishing.checkout`, handed to the theme.

Below each page stands a link that opens an issue about it, where the repository's address is known.
"""

from html import escape
from pathlib import Path
from urllib.parse import urlencode

from sphinx.application import Sphinx
from sphinx.config import Config

from kvreport.publishing import checkout

# Colab opens notebooks of public GitHub repositories.
COLAB = "https://colab.research.google.com"


def issue_address(book: checkout.Origin, page: str) -> str | None:
    """Return the address of a new issue with page and version filled in; None where the repository is not known."""
    if book.repository is None:
        return None
    title = f"On page {page}.html"
    body = f"Page: {page}.html\nVersion: {book.version} ({book.branch})\n\nWhat is wrong, missing or unclear?\n"
    if "gitlab" in book.repository:
        return f"{book.repository}/-/issues/new?{urlencode({'issue[title]': title, 'issue[description]': body})}"
    return f"{book.repository}/issues/new?{urlencode({'title': title, 'body': body})}"


def ask_for_an_issue(book: checkout.Origin, page: str) -> str:
    """Write a link that opens an issue about a page; nothing where the repository is not known."""
    if (address := issue_address(book, page)) is None:
        return ""
    link = f'<a href="{escape(address)}">Something wrong or unclear on this page? Tell us.</a>'
    return f'<p class="kvbook-feedback">{link}</p>'


def tell_the_theme(app: Sphinx, config: Config) -> None:
    """Hand the theme authors and address, before it looks at its options."""
    book = app.kvbook_origin = checkout.of(Path(app.srcdir))
    config.author = ", ".join(book.names)
    config.copyright = str(book.year)
    options = config.html_theme_options
    # Jupyter Book's own default would send readers to Jupyter Book's repository.
    options.pop("repository_url", None)
    if book.repository is not None:
        options["repository_url"], options["repository_branch"] = book.repository, book.branch
        if "github.com" in book.repository:
            options["launch_buttons"] = {**options.get("launch_buttons", {}), "colab_url": COLAB}
        options["use_repository_button"] = options["use_edit_page_button"] = True
    if book.site is not None:
        config.html_baseurl = config.ogp_site_url = book.site
        config.ogp_use_first_image = True
