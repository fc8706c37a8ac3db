"""Verdicts on documents' claims: judged when a page is read, so that another rule executes nothing."""

import hashlib
import json
from types import SimpleNamespace

import pytest

from kvreport.publishing import citation, evaluated, published
from kvreport.site import ledger, overlay

TABLE = "tab-claims-some-thread"
TODAY = "verdict,claim\nrefuted,Water is wet.\n"


def judged(verdict: str) -> dict:
    rows = [{"verdict": verdict, "claim": "Water is wet."}]
    return {"numbers": {}, "verdicts": {"document": "some-thread", "table": TABLE, "rows": rows}}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy that was executed when its claim was undecided; since then the rule has changed."""
    table = {"name": TABLE, "published": True, "csv": "verdict\nundecided\n", "files": {"csv": "0"}}
    other = {"name": "tab-other", "csv": "a\n1\n", "files": {"csv": "1"}}
    outputs = [{"metadata": {"text/html": {"kvbook_table": one}}} for one in (table, other)]
    captions = "\n".join(f":::{{caption}} {name}\nA table.\n:::" for name in (TABLE, "tab-other"))
    notebook = {"cells": [{"cell_type": "markdown", "source": captions}, {"cell_type": "code", "outputs": outputs}]}
    file = tmp_path / "executed" / "01_one.ipynb"
    file.parent.mkdir()
    file.write_text(json.dumps(notebook | {"metadata": {"kvbook": {}}}))
    monkeypatch.setattr(evaluated, "published", lambda name: judged("refuted"))
    monkeypatch.setattr(evaluated, "own", lambda name, folders: judged("reproduced"))
    return file


def test_a_verdict_is_that_of_today_for_page_ledger_and_download_and_the_copy_stays_as_it_is(copy, monkeypatch):
    before = copy.read_bytes()
    table, other = (item for item, _ in published.items(published.read(copy)))
    assert table["csv"] == TODAY
    assert table["files"] == {"csv": hashlib.sha256(TODAY.encode()).hexdigest()}
    assert other["csv"] == "a\n1\n"
    folders = SimpleNamespace(figures=copy.parents[1] / "figures")
    chapter = SimpleNamespace(executed=copy, source=copy, stem="01_one", folders=folders)
    assert [(row["verdict"], row["document"]) for row in ledger.verdicts([chapter])] == [("refuted", "some-thread")]
    monkeypatch.setattr(citation, "of_published", lambda item, book: item.name)
    overlay.write_citations([chapter], None)
    made = {file.name: file.read_text() for file in overlay.cited_in(chapter).iterdir()}
    assert made == {f"{TABLE}.csv": TODAY, f"{TABLE}.bib": TABLE, "tab-other.bib": "tab-other"}
    assert copy.read_bytes() == before


def test_a_table_of_ones_own_rows_is_judged_by_these(copy):
    copy.write_text(copy.read_text().replace('"published": true', '"published": false'))
    (table, _), _ = published.items(published.read(copy))
    assert "reproduced" in table["csv"]
