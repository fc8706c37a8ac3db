"""What the documents published: their numbers, and the words that each claim rests on."""

import re
from typing import get_args

import pytest

from kvbook import paths
from kvreport.chapters.layer_drift import rows as layer_drift
from kvreport.publishing import documents, judging

FIELDS = {"id", "claim", "quote", "place", "published"}


def test_the_published_table_has_every_layer_of_every_column_and_the_numbers_of_the_page():
    table = layer_drift.published()
    llama = {("llama", dtype): 34 for dtype in ("bfloat16", "float16", "float32")}
    assert table.groupby(["family", "dtype"]).size().to_dict() == {("gpt2", "float16"): 14} | llama
    assert (table.loc[table["layer"] == 0, "max_abs"] == 0).all()
    drift = table.set_index(["family", "dtype", "layer"])["max_abs"]
    assert drift["llama", "float32", 16] == 8.94695520401001e-06
    assert drift["llama", "bfloat16", 33] == 0.1447247314453125
    assert drift["gpt2", "float16", 12] == 0.190262451171875


DOCUMENTS = [path.stem for path in paths.DOCUMENTS.glob("*.yaml")]


def faults(claims: list[dict[str, str]]) -> list[str]:
    """Name the claims that do not say on which words of the document they rest, in which place."""
    found = [claim["id"] for claim in claims if claim.keys() - {"chapter"} != FIELDS or not all(claim.values())]
    return found + [claim["id"] for claim in claims if not 1 <= len(claim.get("quote", "").split()) < 40]


# Items of a list, which the document ends without a full stop.
UNPUNCTUATED = {"grows-with-depth", "coarser-is-worse"}


def is_cut_in_silence(claim: dict[str, str]) -> bool:
    """Tell whether a quote begins or ends within a sentence and does not show it."""
    begins, ends = re.match(r"[A-Z…]|model\.forward", claim["quote"]), re.search(r"[.?!…]$", claim["quote"])
    return not begins or not (ends or claim["id"] in UNPUNCTUATED)


def test_control_a_sentence_that_loses_its_reason_is_found():
    (prefill,) = (c for c in documents.published("issue-25420")["claims"] if c["id"] == "prefill-exact")
    reason = ", as the inputs contain the same values and shapes."
    assert prefill["quote"].endswith(reason)
    assert is_cut_in_silence(prefill | {"quote": prefill["quote"].removesuffix(reason)})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_claim_rests_on_a_few_whole_sentences_of_its_document_or_shows_where_they_are_cut(document):
    claims = documents.published(document)["claims"]
    assert faults(claims) == []
    assert [claim["id"] for claim in claims if is_cut_in_silence(claim)] == []
    # Two claims on the same words would count them twice.
    for field in ("id", "quote"):
        assert len({claim[field] for claim in claims}) == len(claims) > 0


def test_control_a_claim_without_words_or_with_a_whole_page_is_found():
    claim = documents.published("blog-past")["claims"][0]
    # Of the last, the rule stands in the code that runs, and nowhere else.
    for wrong in ({"quote": ""}, {"quote": "word " * 40}, {"place": ""}, {"check": "Reproduced when it is."}):
        assert faults([claim | wrong])


def test_the_page_on_measuring_explains_every_word_of_a_verdict():
    text = (paths.ROOT / "pages" / "measuring.md").read_text("utf-8")
    assert set(get_args(judging.Word)) == set(re.findall(r"^(.+)\n: ", text, re.MULTILINE))
