"""What the documents published: their numbers, and the words that each claim rests on."""

import re
from typing import get_args

import pytest

from kvbook import paths
from kvreport.publishing import documents, judging

FIELDS = {"id", "claim", "quote", "place", "published"}


def test_the_published_table_has_every_layer_of_every_column():
    table = documents.published_drift()
    counts = table.groupby(["family", "dtype"]).size()
    assert counts.to_dict() == {
        ("gpt2", "float16"): 14,
        ("llama", "bfloat16"): 34,
        ("llama", "float16"): 34,
        ("llama", "float32"): 34,
    }
    assert (table.loc[table["layer"] == 0, "max_abs"] == 0).all()


def test_published_numbers_are_those_of_the_page():
    table = documents.published_drift().set_index(["family", "dtype", "layer"])["max_abs"]
    assert table["llama", "float32", 16] == 8.94695520401001e-06
    assert table["llama", "bfloat16", 33] == 0.1447247314453125
    assert table["gpt2", "float16", 12] == 0.190262451171875


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_quote_is_of_whole_sentences_or_shows_where_it_is_cut(document):
    assert [c["id"] for c in documents.published(document)["claims"] if is_cut_in_silence(c)] == []


def test_control_a_sentence_that_loses_its_reason_is_found():
    (prefill,) = (c for c in documents.published("issue-25420")["claims"] if c["id"] == "prefill-exact")
    reason = ", as the inputs contain the same values and shapes."
    assert prefill["quote"].endswith(reason)
    assert is_cut_in_silence(prefill | {"quote": prefill["quote"].removesuffix(reason)})


def test_what_no_document_claims_is_not_judged():
    asked = {claim["id"] for name in DOCUMENTS for claim in documents.published(name)["claims"]}
    printed = {"element-counts", "peak-memory", "answer-survives"}
    described = {"recipe-is-safe", "roberta-number-shows-it", "no-way-to-reduce"}
    assert asked & (printed | described) == set()
    # The numbers stay, as facts of the documents.
    assert documents.published("notebook-static")["peak_gib"] == 12.07
    assert documents.published("forum-reuse")["split"]["counts"][0]["elements"] == 75776


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_claim_rests_on_a_few_words_of_its_document(document):
    claims = documents.published(document)["claims"]
    assert faults(claims) == []
    # Two claims on the same words would count them twice.
    for field in ("id", "quote"):
        assert len({claim[field] for claim in claims}) == len(claims) > 0


def test_control_a_claim_without_words_or_with_a_whole_page_is_found():
    claim = documents.published("blog-past")["claims"][0]
    assert faults([claim | {"quote": ""}])
    assert faults([claim | {"quote": "word " * 40}])
    assert faults([claim | {"place": ""}])
    # The rule stands in the code that runs, and nowhere else.
    assert faults([claim | {"check": "Reproduced when it is."}])


def test_the_page_on_measuring_explains_every_word_of_a_verdict():
    text = (paths.ROOT / "pages" / "measuring.md").read_text("utf-8")
    explained = re.findall(r"^(.+)\n: ", text, re.MULTILINE)
    assert set(get_args(judging.Word)) == set(explained)
