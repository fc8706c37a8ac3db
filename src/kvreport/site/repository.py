"""What the pages say of authors and address: read by :mod:`kvreport.publishing.checkout`, handed to the theme."""

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config

from kvreport.publishing import checkout as origin

# Colab opens notebooks of public GitHub repositories.
COLAB = "https://colab.research.google.com"


def connect(app: Sphinx) -> None:
    """Join the build before the theme looks at its options."""
    app.connect("config-inited", _tell_the_theme, priority=100)


def _tell_the_theme(app: Sphinx, config: Config) -> None:
    book = origin.of(Path(app.srcdir))
    config.author = ", ".join(book.names)
    config.copyright = str(book.year)
    options = config.html_theme_options
    # Jupyter Book's own default would send readers to Jupyter Book's repository.
    options.pop("repository_url", None)
    if book.repository is not None:
        options["repository_url"], options["repository_branch"] = book.repository, book.branch
        if "github.com" in book.repository:
            options["launch_buttons"] = {**options.get("launch_buttons", {}), "colab_url": COLAB}
        options["use_repository_button"] = options["use_issues_button"] = options["use_edit_page_button"] = True
    if book.site is not None:
        config.html_baseurl = config.ogp_site_url = book.site
        config.ogp_use_first_image = True
