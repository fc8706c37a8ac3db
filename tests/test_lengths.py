import pytest

from kvbook import lengths
from kvbook.errors import UserError
from kvbook.models import corpus
from kvbook.runs import samples
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.layer_drift.settings import LayerDriftSettings
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings


class Letters:
    """A tokenizer whose ids are characters."""

    def __call__(self, text, truncation=False, max_length=None, verbose=True):
        ids = list(map(ord, text))
        return {"input_ids": ids[:max_length] if truncation else ids}


@pytest.mark.parametrize(
    ("given", "meant"), [(64, 64), ("64", 64), ("33-190", "33-190"), (" 33 - 190 ", "33-190"), ("40-40", 40)]
)
def test_a_length_is_a_number_or_a_range(given, meant):
    assert LayerDriftSettings.checked(n_tokens=given).n_tokens == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("long", "a range of them such as 33-190"),
        ("33-", "a range of them such as 33-190"),
        ("-5", "a range of them such as 33-190"),
        (True, "a range of them such as 33-190"),
        (3.5, "a range of them such as 33-190"),
        ([33, 190], "a range of them such as 33-190"),
        ("190-33", "from its least to its largest"),
        ("1-9", "at least 2 tokens"),
        (0, "at least 2 tokens"),
    ],
)
def test_what_is_no_length_is_refused_in_one_line_that_names_the_parameter(given, message):
    with pytest.raises(UserError, match=message) as error:
        LayerDriftSettings.checked(n_tokens=given)
    assert str(error.value).startswith("n_tokens = ")
    assert "\n" not in str(error.value)
    assert str(error.value).count("n_tokens") == 1


def test_the_chapters_ask_for_as_many_tokens_as_they_need():
    for settings, fewest in ((LayerDriftSettings, 2), (WhereDriftBeginsSettings, 3), (BugOrRoundingSettings, 4)):
        assert settings.checked(n_tokens=f"{fewest}-9").n_tokens == f"{fewest}-9"
        with pytest.raises(UserError, match=f"at least {fewest} tokens"):
            settings.checked(n_tokens=f"{fewest - 1}-9")


def test_drawn_lengths_fill_the_range_and_depend_on_the_seed_alone():
    drawn = [lengths.drawn("33-190", index) for index in range(2000)]
    assert (min(drawn), max(drawn)) == (33, 190)
    assert len(set(drawn)) == 158
    # Evenly: the mean of 2,000 draws is within four of its standard errors.
    assert abs(sum(drawn) / 2000 - lengths.middle("33-190")) < 4 * 45.6 / 2000**0.5 + 0.5
    assert drawn == [lengths.drawn("33-190", index) for index in range(2000)]
    assert drawn != [lengths.drawn("33-190", index, seed=1) for index in range(2000)]
    # Control: a number is never drawn.
    assert {lengths.drawn(64, index, seed) for index in range(9) for seed in range(9)} == {64}


def test_a_longer_range_lengthens_every_text_by_as_much():
    for length in (64, "33-190"):
        one, other = ([lengths.drawn(of, i, seed=3) for i in range(50)] for of in (length, lengths.plus(length, 1)))
        assert other == [n + 1 for n in one]


@pytest.fixture(params=["stdlib", "folder"])
def corpus_name(request, tmp_path):
    for index in range(30):
        (tmp_path / f"{index:02}.py").write_text(f"{index:02}" + "x" * 40)
    return "stdlib" if request.param == "stdlib" else str(tmp_path)


def test_a_texts_file_place_and_length_do_not_depend_on_how_many_texts_there_are(corpus_name):
    few, many = (list(corpus.samples(corpus_name, Letters(), n, "5-40", seed=4)) for n in (3, 30))
    assert few == many[:3]
    assert [len(text.ids) for text in many] == [lengths.drawn("5-40", i, 4) for i in range(30)]
    # Control: with another seed, lengths and order are others.
    other = list(corpus.samples(corpus_name, Letters(), 30, "5-40", seed=5))
    assert [len(text.ids) for text in other] != [len(text.ids) for text in many]
    assert [text.source for text in other] != [text.source for text in many]


def test_a_text_of_a_drawn_length_begins_where_one_of_the_largest_does(corpus_name):
    drawn, whole = (list(corpus.samples(corpus_name, Letters(), 30, n)) for n in ("5-40", 40))
    assert [(text.source, text.start) for text in drawn] == [(text.source, text.start) for text in whole]
    assert all(text.ids == full.ids[: len(text.ids)] for text, full in zip(drawn, whole, strict=True))


def test_the_largest_length_of_a_range_must_fit_the_context(llama_folder, text_folder):
    fits, not_fits = (
        LayerDriftSettings.checked(model=str(llama_folder), corpus=str(text_folder), n_tokens=n)
        for n in ("8-64", "8-65")
    )
    assert samples.identities(fits, [fits.model], fits.n_tokens)
    with pytest.raises(UserError, match="65 tokens are more than the context"):
        samples.identities(not_fits, [not_fits.model], not_fits.n_tokens)
