"""The atlas's badges beside the pages: ``badges/<architecture>.svg``, from the run that the book cites."""

from pathlib import Path

from sphinx.application import Sphinx

from kvbook.runs import evidence

FOLDER = "badges"


def connect(app: Sphinx) -> None:
    """Join the build."""
    app.connect("build-finished", _write)


def _write(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.name == "html" and evidence.folders("atlas"):
        # Late, for these bring torch.
        from kvbook.atlas import badges
        from kvreport.chapters.atlas import results, tables

        badges.write(tables.rows(results.recorded()), Path(app.outdir) / FOLDER)
