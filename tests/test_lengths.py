"""Lengths of texts: numbers and ranges, as settings read them and as texts draw them."""

import pytest

from kvbook import lengths
from kvbook.errors import UserError
from kvbook.models import corpus
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.layer_drift.settings import LayerDriftSettings
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings


@pytest.mark.parametrize(
    ("given", "meant"), [(64, 64), ("64", 64), ("33-190", "33-190"), (" 33 - 190 ", "33-190"), ("40-40", 40)]
)
def test_a_length_is_a_number_or_a_range(given, meant):
    assert LayerDriftSettings.checked(n_tokens=given).n_tokens == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((given, "a range of them such as 33-190") for given in ("long", "33-", "-5", True, 3.5, [33, 190])),
        ("190-33", "from its least to its largest"), ("1-9", "at least 2 tokens"), (0, "at least 2 tokens"),
    ],
)
def test_what_is_no_length_is_refused_in_one_line_that_names_the_parameter_once(given, message):
    with pytest.raises(UserError, match=rf"^n_tokens = [^\n]*{message}[^\n]*$") as error:
        LayerDriftSettings.checked(n_tokens=given)
    assert str(error.value).count("n_tokens") == 1


@pytest.mark.parametrize(
    ("settings", "fewest"), [(LayerDriftSettings, 2), (WhereDriftBeginsSettings, 3), (BugOrRoundingSettings, 4)]
)
def test_the_chapters_ask_for_as_many_tokens_as_they_need(settings, fewest):
    assert settings.checked(n_tokens=f"{fewest}-9").n_tokens == f"{fewest}-9"
    with pytest.raises(UserError, match=f"at least {fewest} tokens"):
        settings.checked(n_tokens=f"{fewest - 1}-9")


def test_drawn_lengths_fill_the_range_and_depend_on_the_seed_alone():
    def drawn(length, seed=0):
        return [lengths.drawn(length, index, seed) for index in range(2000)]

    some = drawn("33-190")
    assert set(some) == set(range(33, 191))
    # Evenly: the mean of 2,000 draws is within four of its standard errors.
    assert abs(sum(some) / 2000 - lengths.middle("33-190")) < 4 * 45.6 / 2000**0.5 + 0.5
    assert some == drawn("33-190") != drawn("33-190", seed=1)
    # Each text is as much longer as the range.
    assert drawn(lengths.plus("33-190", 1)) == [n + 1 for n in some]
    # Control: a number is never drawn.
    assert set(drawn(64)) == set(drawn(64, seed=1)) == {64}


@pytest.fixture(params=["stdlib", "folder"])
def texts(request, tmp_path):
    """Cut texts of a corpus, a token a character."""
    for index in range(30):
        (tmp_path / f"{index:02}.py").write_text(f"{index:02}" + "x" * 40)
    name = "stdlib" if request.param == "stdlib" else str(tmp_path)

    def letters(text, max_length=None, **_):
        return {"input_ids": list(map(ord, text))[:max_length]}

    return lambda *options: list(corpus.samples(name, letters, *options))


def test_a_texts_file_place_and_length_do_not_depend_on_how_many_texts_there_are(texts):
    many, other = texts(30, "5-40", 4), texts(30, "5-40", 5)
    assert texts(3, "5-40", 4) == many[:3]
    assert [len(text.ids) for text in many] == [lengths.drawn("5-40", index, 4) for index in range(30)]
    # Control: with another seed, lengths and order are others.
    assert [len(text.ids) for text in other] != [len(text.ids) for text in many]
    assert [text.source for text in other] != [text.source for text in many]


def test_a_text_of_a_drawn_length_begins_where_one_of_the_largest_does(texts):
    for drawn, whole in zip(texts(30, "5-40"), texts(30, 40), strict=True):
        assert (drawn.source, drawn.start, drawn.ids) == (whole.source, whole.start, whole.ids[: len(drawn.ids)])
