"""The ledger of all claims.

The verdicts are read from the tables of claims that the executed chapters published, so the ledger can only say what
the chapters' pages say.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import get_args

import pandas as pd

from kvreport.publishing import published
from kvreport.publishing.judging import Word
from kvreport.running.planning import Chapter
from kvreport.site.overlay import csv_table

# A claim whose verdicts on several processors are not one word counts once, as this.
DIFFERS = "differs by processor"


def verdicts(chapters: Iterable[Chapter]) -> Iterator[dict[str, str]]:
    """Yield every verdict that the chapters published."""
    for chapter in chapters:
        for table, _ in published.items(published.read(chapter.executed)):
            if "document" in table:
                about = {"document": table["document"], "table": table["name"]}
                yield from (about | row for row in csv.DictReader(io.StringIO(table["csv"])))


def markdown(rows: Iterable[dict[str, str]]) -> str:
    """Write the ledger: how many verdicts of each kind, then every claim in one table."""
    claims = pd.DataFrame(rows)
    if claims.empty:
        return "No chapter has published verdicts yet."
    claims["kind"] = claims["verdict"].where(claims["verdict"].isin(get_args(Word)), DIFFERS)
    claims["link"] = "[" + claims["document"] + "](#" + claims["table"] + ")"
    # A document's name leads to the table of the first chapter on it.
    documents = claims.groupby("document", sort=False)["link"].first()
    counts = Counter(claims["kind"])
    kinds = ", ".join(
        f"{count} {verdict if count == 1 else verdict.replace('differs', 'differ')}"
        for verdict, count in counts.most_common()
    )
    parts = [f"Claims checked: {len(claims)}; documents: {len(documents)}; verdicts: {kinds}."]
    # What a claim quotes is in the table below.
    differing = claims[claims["kind"] == DIFFERS].itertuples()
    lines = [f"- {row.claim.partition(' “')[0].rstrip('.')}: **{row.verdict}**." for row in differing]
    parts += ["\n".join(lines)] if lines else []
    words = [word for word in (*get_args(Word), DIFFERS) if word in counts]
    summary = pd.crosstab(claims["kind"], claims["document"]).loc[words, documents.index]
    summary = summary.map(lambda count: count or "").set_axis(documents, axis=1).reset_index(names="verdict")
    caption = "Verdicts on the documents' claims, counted; each document's name leads to its claims in the chapter."
    parts.append(csv_table("tab-ledger", caption, summary))
    caption = (
        "Every claim in our words and its own, with its verdict. A document's name leads to the rule, the numbers and "
        "what it published; n counts independent units."
    )
    shown = claims.assign(document=claims["link"])[["verdict", "document", "n", "claim"]]
    table = csv_table("tab-ledger-claims", caption, shown, filtered=True)
    parts.append(f":::::{{dropdown}} All {len(claims)} claims, to search and to sort\n{table}\n:::::")
    return "\n\n".join(parts)
