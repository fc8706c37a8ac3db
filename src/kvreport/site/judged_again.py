"""Verdicts on a document's claims are judged when the site is built: another rule executes no notebook."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from kvreport.publishing import evaluated
from kvreport.publishing.table_output import csv_of, laid_out
from kvreport.running.planning import Chapter
from kvreport.site import sentences


def bring_up_to_date(chapter: Chapter) -> None:
    """Put today's verdicts on a chapter's rows into its executed copy, and into the file that it offers."""
    book = evaluated.published(chapter.name)
    if book is None or book["verdicts"] is None:
        return
    executed = json.loads(chapter.executed.read_text("utf-8"))
    name = book["verdicts"]["table"]
    for output in _tables(executed, name):
        table = output["metadata"]["text/html"]["kvbook_table"]
        found = book if table.get("published") else evaluated.own(chapter.name, sentences.measured(executed))
        if found is None:
            continue
        shown = pd.DataFrame(found["verdicts"]["rows"])
        data, rows = laid_out(shown)
        if rows["csv"] == table["csv"]:
            continue
        content = csv_of(shown)
        digest = hashlib.sha256(content).hexdigest()
        output["data"] |= data
        table |= rows | {"files": {"csv": digest}}
        executed["metadata"]["kvbook"]["files"][f"{name}.csv"] = digest
        (chapter.figures / f"{name}.csv").write_bytes(content)
        part = chapter.executed.with_suffix(".judged")
        part.write_text(json.dumps(executed, indent=1, ensure_ascii=False) + "\n", "utf-8")
        part.replace(chapter.executed)


def _tables(executed: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    for cell in executed["cells"]:
        for output in cell.get("outputs", ()):
            if output.get("metadata", {}).get("text/html", {}).get("kvbook_table", {}).get("name") == name:
                yield output
