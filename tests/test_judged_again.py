"""Verdicts on documents' claims: judged when the site is built, so that another rule executes nothing."""

import hashlib
import json
from types import SimpleNamespace

import pytest

from kvreport.publishing import evaluated
from kvreport.site import judged_again

TABLE = "tab-claims-some-thread"
CHAPTER = "some_chapter"


def judged(verdict: str) -> dict:
    return {"verdicts": {"table": TABLE, "rows": [{"verdict": verdict, "claim": "Water is wet."}]}}


@pytest.fixture
def chapter(tmp_path, monkeypatch):
    """A chapter whose copy was executed when its claim was called undecided."""
    (tmp_path / f"{TABLE}.csv").write_text("verdict,claim\nundecided,Water is wet.\n")
    table = {"name": TABLE, "published": True, "csv": "verdict,claim\nundecided,Water is wet.\n", "files": {"csv": "0"}}
    output = {"data": {"text/html": "old", "text/plain": "old"}, "metadata": {"text/html": {"kvbook_table": table}}}
    figure = {"data": {"image/png": "a"}, "metadata": {"image/png": {"name": "fig-x"}}}
    copy = {
        "cells": [{"cell_type": "markdown"}, {"cell_type": "code", "outputs": [figure, output]}],
        "metadata": {"kvbook": {"files": {f"{TABLE}.csv": "0", "fig-x.png": "1"}}},
    }
    executed = tmp_path / "executed.ipynb"
    executed.write_text(json.dumps(copy))
    monkeypatch.setattr(evaluated, "published", lambda name: judged("refuted"))
    monkeypatch.setattr(evaluated, "own", lambda name, folders: judged("reproduced"))
    return SimpleNamespace(name=CHAPTER, executed=executed, figures=tmp_path)


def shown(chapter) -> tuple[dict, dict]:
    copy = json.loads(chapter.executed.read_text())
    return copy["cells"][1]["outputs"][1], copy["metadata"]["kvbook"]["files"]


def test_another_rule_changes_the_table_its_file_and_their_digests(chapter):
    judged_again.bring_up_to_date(chapter)
    output, files = shown(chapter)
    table = output["metadata"]["text/html"]["kvbook_table"]
    assert table["csv"] == "verdict,claim\nrefuted,Water is wet.\n"
    assert "refuted" in output["data"]["text/html"]
    assert "refuted" in output["data"]["text/plain"]
    content = (chapter.figures / f"{TABLE}.csv").read_bytes()
    assert content == b"verdict,claim\nrefuted,Water is wet.\n"
    assert files == {f"{TABLE}.csv": hashlib.sha256(content).hexdigest(), "fig-x.png": "1"}
    assert table["files"]["csv"] == files[f"{TABLE}.csv"]


def test_control_the_same_verdicts_leave_the_copy_as_it_is(chapter, monkeypatch):
    monkeypatch.setattr(evaluated, "published", lambda name: judged("undecided"))
    before = chapter.executed.read_text()
    judged_again.bring_up_to_date(chapter)
    assert chapter.executed.read_text() == before


def test_a_table_of_ones_own_rows_is_judged_by_these(chapter):
    copy = json.loads(chapter.executed.read_text())
    copy["cells"][1]["outputs"][1]["metadata"]["text/html"]["kvbook_table"]["published"] = False
    chapter.executed.write_text(json.dumps(copy))
    judged_again.bring_up_to_date(chapter)
    assert "reproduced" in shown(chapter)[0]["metadata"]["text/html"]["kvbook_table"]["csv"]


@pytest.mark.parametrize("of", [None, {"verdicts": None}])
def test_a_chapter_that_answers_no_document_is_left_alone(chapter, monkeypatch, of):
    monkeypatch.setattr(evaluated, "published", lambda name: of)
    before = chapter.executed.read_text()
    judged_again.bring_up_to_date(chapter)
    assert chapter.executed.read_text() == before
