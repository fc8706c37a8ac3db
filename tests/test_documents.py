import re
from typing import get_args

from kvbook import paths
from kvreport.publishing import documents, verdicts


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


def test_every_claim_says_how_it_is_checked():
    claims = documents.published("issue-25420")["claims"]
    assert len({claim["id"] for claim in claims}) == len(claims) == 15
    assert all(claim["claim"] and claim["published"] and claim["check"] for claim in claims)


def test_the_page_on_measuring_explains_every_word_of_a_verdict():
    text = (paths.ROOT / "pages" / "measuring.md").read_text("utf-8")
    explained = re.findall(r"^(.+)\n: ", text, re.MULTILINE)
    assert set(get_args(verdicts.Word)) == set(explained)
