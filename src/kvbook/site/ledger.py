"""The ledger of all claims, where a page asks for it with ``<!-- ledger -->``.

The verdicts are read from the tables ``tab-claims-<document>`` that the executed chapters published, so the ledger can
only say what the chapters' pages say.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator

from sphinx.application import Sphinx

from kvbook.execution import Chapter
from kvbook.site.overlay import table_directive

MARK = "<!-- ledger -->"
_PREFIX = "tab-claims-"


def connect(app: Sphinx) -> None:
    """Join the build; after `executed`, which has brought every chapter up to date by then."""
    app.connect("source-read", _write)


def verdicts(chapters: Iterable[Chapter]) -> Iterator[dict[str, str]]:
    """Yield every verdict that the chapters published.

    Parameters
    ----------
    chapters
        Executed chapters.

    Yields
    ------
    dict
        ``document``, ``table`` (its name, to link to), ``claim``, ``published``, ``here``, ``verdict``.
    """
    for chapter in chapters:
        for cell in json.loads(chapter.executed.read_text("utf-8"))["cells"]:
            for output in cell.get("outputs", ()):
                table = output.get("metadata", {}).get("text/html", {}).get("kvbook_table", {})
                if table.get("name", "").startswith(_PREFIX):
                    about = {"document": table["name"].removeprefix(_PREFIX), "table": table["name"]}
                    yield from (about | row for row in csv.DictReader(io.StringIO(table["csv"])))


def markdown(rows: Iterable[dict[str, str]]) -> str:
    """Write the ledger: how many verdicts of each kind, then a row for every claim.

    Parameters
    ----------
    rows
        From `verdicts`.
    """
    rows = list(rows)
    if not rows:
        return "No chapter has published verdicts yet."
    counts = Counter(row["verdict"] for row in rows)
    documents = len({row["document"] for row in rows})
    kinds = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["document", "claim", "verdict"])
    writer.writerows([f"[{row['document']}](#{row['table']})", row["claim"], row["verdict"]] for row in rows)
    caption = "Every claim that the documents make and this book has checked, with the verdict that the rows gave."
    table = table_directive({"caption": caption, "name": "tab-ledger", "csv": lines.getvalue()})
    return f"Claims checked: {len(rows)}; documents: {documents}; verdicts: {kinds}.\n\n{table}"


def _write(app: Sphinx, _docname: str, source: list[str]) -> None:
    if MARK in source[0]:
        chapters = app.kvbook_chapters.values()
        source[0] = source[0].replace(MARK, markdown(verdicts(chapters)))
