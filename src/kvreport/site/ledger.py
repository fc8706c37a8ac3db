"""The ledger of all claims.

The verdicts are read from the tables ``tab-claims-<document>`` that the executed chapters published, so the ledger can
only say what the chapters' pages say.  A second chapter on a document calls its table
``tab-claims-<document>-<words>``.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from kvbook import paths
from kvreport.publishing import published
from kvreport.publishing.judging import Word
from kvreport.running.planning import Chapter
from kvreport.site.overlay import csv_table

_PREFIX = "tab-claims-"
# A claim whose verdicts on several processors are not one word counts once, as this.
DIFFERS = "differs by processor"


def verdicts(chapters: Iterable[Chapter]) -> Iterator[dict[str, str]]:
    """Yield every verdict that the chapters published."""
    for chapter in chapters:
        for output in published.outputs(published.read(chapter.executed)):
            if (table := published.table_of(output)) and table["name"].startswith(_PREFIX):
                about = {"document": _document(table["name"]), "table": table["name"]}
                yield from (about | row for row in csv.DictReader(io.StringIO(table["csv"])))


def _document(table: str) -> str:
    """Name the document of a table: the longest whose name the table's begins with."""
    named = table.removeprefix(_PREFIX)
    known = [path.stem for path in paths.DOCUMENTS.glob("*.yaml")]
    return max((name for name in known if f"{named}-".startswith(f"{name}-")), key=len, default=named)


def markdown(rows: Iterable[dict[str, str]]) -> str:
    """Write the ledger: how many verdicts of each kind, then every claim in one table."""
    rows = list(rows)
    if not rows:
        return "No chapter has published verdicts yet."
    documents: dict[str, list[str]] = {}
    for row in rows:
        if row["table"] not in (tables := documents.setdefault(row["document"], [])):
            tables.append(row["table"])
    counts = Counter(map(_kind, rows))
    kinds = ", ".join(
        f"{count} {verdict if count == 1 else verdict.replace('differs', 'differ')}"
        for verdict, count in counts.most_common()
    )
    parts = [f"Claims checked: {len(rows)}; documents: {len(documents)}; verdicts: {kinds}."]
    differing = [row for row in rows if _kind(row) == DIFFERS]
    # What a claim quotes is in the table below.
    lines = [f"- {row['claim'].partition(' “')[0].rstrip('.')}: **{row['verdict']}**." for row in differing]
    parts += ["\n".join(lines)] if lines else []
    by_document = Counter((row["document"], _kind(row)) for row in rows)
    summary = [
        [word, *(by_document[document, word] or "" for document in documents)]
        for word in (*get_args(Word), DIFFERS)
        if word in counts
    ]
    header = ["verdict", *(f"[{document}](#{tables[0]})" for document, tables in documents.items())]
    caption = "Verdicts on the documents' claims, counted; each document's name leads to its claims in the chapter."
    parts.append(csv_table("tab-ledger", caption, [header, *summary]))
    claims = [[row["verdict"], f"[{row['document']}](#{row['table']})", row["n"], row["claim"]] for row in rows]
    caption = (
        "Every claim in our words and its own, with its verdict. A document's name leads to the rule, the numbers and "
        "what it published; n counts independent units."
    )
    table = csv_table("tab-ledger-claims", caption, [["verdict", "document", "n", "claim"], *claims], filtered=True)
    parts.append(f":::::{{dropdown}} All {len(rows)} claims, to search and to sort\n{table}\n:::::")
    return "\n\n".join(parts)


def _kind(row: Mapping[str, str]) -> str:
    """Give a claim's verdict, or that it is another one on each processor."""
    return row["verdict"] if row["verdict"] in get_args(Word) else DIFFERS
