"""The atlas's badges beside the pages: ``badges/<architecture>.svg``, from the run that the book cites."""

from pathlib import Path

from sphinx.application import Sphinx

from kvbook import fingerprint
from kvbook.runs import evidence

FOLDER = "badges"


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write the badges, unless they are there."""
    if exception is None and app.builder.name == "html" and (cited := evidence.folders("atlas")):
        folder = Path(app.outdir) / FOLDER
        # Of which run and by which source they were made.
        note = folder / ".made-of"
        made_of = "\n".join([*(folder.name for folder in cited), fingerprint.of_source(["kvbook.atlas.badges"])])
        if note.is_file() and note.read_text("utf-8") == made_of:
            return
        # Late, and only where they are not there yet, for these bring torch.
        from kvbook.atlas import badges
        from kvreport.publishing import found

        badges.write(found.printed("atlas")["architectures"]["row"], folder)
        note.write_text(made_of, "utf-8")
