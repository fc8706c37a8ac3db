"""The package's modules with the first line of their documentation, read without importing them."""

import ast
import csv
import io

from kvbook import fingerprint
from kvreport.site.context import Context
from kvreport.site.overlay import table_directive


def markdown(_context: Context) -> str:
    """Write the table of modules."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["module", "what it is for"])
    for package, path in ((p, f) for p in fingerprint.PACKAGES.values() for f in sorted(p.rglob("*.py"))):
        relative = path.relative_to(package.parent).with_suffix("")
        parts = relative.parts[:-1] if path.stem == "__init__" else relative.parts
        about = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        # reStructuredText's double fence is Markdown's single one.
        first = " ".join(about.split("\n\n", 1)[0].split()).replace("``", "`")
        writer.writerow([f"`{'.'.join(parts)}`", _plain(first)])
    caption = "The modules of the two packages."
    return table_directive({"caption": caption, "name": "tab-modules", "csv": lines.getvalue()})


def _plain(text: str) -> str:
    # Another module's name stays a name here: not every one has a place to link to.
    return text.replace(":mod:`~", "`").replace(":mod:`", "`").replace(":func:`", "`")
