import pytest
from test_corpus import Letters

from kvbook import lengths
from kvbook.errors import UserError
from kvbook.models import corpus
from kvbook.runs import samples
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.layer_drift.settings import LayerDriftSettings
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings


@pytest.mark.parametrize(
    ("given", "meant"), [(64, 64), ("64", 64), ("33-190", "33-190"), (" 33 - 190 ", "33-190"), ("40-40", 40)]
)
def test_a_length_is_a_number_or_a_range(given, meant):
    assert LayerDriftSettings.checked(n_tokens=given).n_tokens == meant


NO_LENGTH = ["long", "33-", "-5", True, 3.5, [33, 190]]


@pytest.mark.parametrize(
    ("given", "message"),
    [*((given, "a range of them such as 33-190") for given in NO_LENGTH), ("190-33", "from its least to its largest"),
     ("1-9", "at least 2 tokens"), (0, "at least 2 tokens")],
)
def test_what_is_no_length_is_refused_in_one_line_that_names_the_parameter(given, message):
    with pytest.raises(UserError, match=message) as error:
        LayerDriftSettings.checked(n_tokens=given)
    assert str(error.value).startswith("n_tokens = ")
    assert str(error.value).count("n_tokens") == 1


@pytest.mark.parametrize(
    ("settings", "fewest"), [(LayerDriftSettings, 2), (WhereDriftBeginsSettings, 3), (BugOrRoundingSettings, 4)]
)
def test_the_chapters_ask_for_as_many_tokens_as_they_need(settings, fewest):
    assert settings.checked(n_tokens=f"{fewest}-9").n_tokens == f"{fewest}-9"
    with pytest.raises(UserError, match=f"at least {fewest} tokens"):
        settings.checked(n_tokens=f"{fewest - 1}-9")


def test_drawn_lengths_fill_the_range_and_depend_on_the_seed_alone():
    drawn, again = ([lengths.drawn("33-190", index) for index in range(2000)] for _ in range(2))
    assert set(drawn) == set(range(33, 191))
    # Evenly: the mean of 2,000 draws is within four of its standard errors.
    assert abs(sum(drawn) / 2000 - lengths.middle("33-190")) < 4 * 45.6 / 2000**0.5 + 0.5
    assert drawn == again != [lengths.drawn("33-190", index, seed=1) for index in range(2000)]
    # Control: a number is never drawn.
    assert {lengths.drawn(64, index, seed) for index in range(9) for seed in range(9)} == {64}


@pytest.mark.parametrize("length", [64, "33-190"])
def test_a_longer_range_lengthens_every_text_by_as_much(length):
    one, other = ([lengths.drawn(of, i, seed=3) for i in range(50)] for of in (length, lengths.plus(length, 1)))
    assert other == [n + 1 for n in one]


@pytest.mark.parametrize("kind", ["stdlib", "folder"])
def test_a_texts_file_and_place_depend_neither_on_its_length_nor_on_how_many_texts_there_are(kind, tmp_path):
    for index in range(30):
        (tmp_path / f"{index:02}.py").write_text(f"{index:02}" + "x" * 40)

    def texts(count, length="5-40", seed=4):
        return list(corpus.samples("stdlib" if kind == "stdlib" else str(tmp_path), Letters(), count, length, seed))

    few, many, whole, other = texts(3), texts(30), texts(30, 40), texts(30, seed=5)
    assert few == many[:3]
    assert [len(text.ids) for text in many] == [lengths.drawn("5-40", i, 4) for i in range(30)]
    assert [(text.source, text.start) for text in many] == [(text.source, text.start) for text in whole]
    assert all(text.ids == full.ids[: len(text.ids)] for text, full in zip(many, whole, strict=True))
    # Control: with another seed, lengths and order are others.
    assert [len(text.ids) for text in other] != [len(text.ids) for text in many]
    assert [text.source for text in other] != [text.source for text in many]


def test_the_largest_length_of_a_range_must_fit_the_context(llama_folder, text_folder):
    fits, not_fits = (
        LayerDriftSettings.checked(model=str(llama_folder), corpus=str(text_folder), n_tokens=n)
        for n in ("8-64", "8-65")
    )
    assert samples.identities(fits, [fits.model], fits.n_tokens)
    with pytest.raises(UserError, match="65 tokens are more than the context"):
        samples.identities(not_fits, [not_fits.model], not_fits.n_tokens)
