"""Texts and how long they are."""

import re
from itertools import combinations

import pytest
from refusing import refusal

from kvbook import lengths
from kvbook.models import corpus, english, loading
from kvbook.runs import samples
from kvreport.chapters.bug_or_rounding import BugOrRoundingSettings
from kvreport.chapters.from_scratch.gpt import text as characters
from kvreport.chapters.layer_drift import LayerDriftSettings
from kvreport.chapters.where_drift_begins import WhereDriftBeginsSettings
from kvreport.running import catalogue


class Letters:
    """A tokenizer whose ids are characters, with a beginning in front; counts its calls."""

    calls = 0

    def __call__(self, text, truncation=False, max_length=None, verbose=True):
        self.calls += 1
        ids = [1, *map(ord, text)]
        return {"input_ids": ids[:max_length] if truncation else ids}


def test_train_and_held_out_share_no_file_and_lose_none():
    train, held_out = set(corpus.stdlib_files("train")), set(corpus.stdlib_files("held-out"))
    assert not train & held_out
    assert 0.03 < len(held_out) / len(train | held_out) < 0.25


def test_a_folder_gives_the_first_tokens_of_its_files_in_name_order(tmp_path):
    for name, text in (("b.py", "bbbb"), ("a.py", "aaaaaaaa"), ("c.txt", "c"), (".hidden", "h" * 9), ("bin", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.bin").write_bytes(b"\xff\xfe\x00")
    found = [(s.source, s.ids) for s in corpus.samples(str(tmp_path), Letters(), 3, 6)]
    assert found == [("a.py", [1, *b"aaaaa"]), ("b.py", [1, *b"bbbb"]), ("c.txt", [1, *b"c"])]
    said = refusal(lambda: list(corpus.samples(str(tmp_path), Letters(), 4, 6)))
    assert re.search("gives 3 samples of at most 6 tokens.*at most 3, or add files", said)
    assert "gives 1 sample of 6 tokens" in refusal(lambda: [*corpus.samples(str(tmp_path), Letters(), 4, 6, full=True)])
    assert "not a folder" in refusal(lambda: list(corpus.documents("/nowhere/at/all")))


def test_samples_of_the_standard_library_have_full_length_and_differ_and_no_file_is_encoded_in_vain():
    counting = Letters()
    found = list(corpus.samples("stdlib", counting, 120, 64))
    assert {len(s.ids) for s in found} == {64}
    assert len({(s.source, s.start) for s in found}) == 120
    assert [s.index for s in found] == list(range(120))
    assert all(corpus.part_of(s.source) == "held-out" for s in found)
    # The second round needs what the first one encoded, and nothing twice.
    assert counting.calls == len(list(corpus.documents("stdlib")))
    counting = Letters()
    assert len({sample.source for sample in corpus.samples("stdlib", counting, 3, 64)}) == counting.calls == 3


def test_a_description_changes_with_the_text(tmp_path):
    described = []
    for text in ("a = 1", "a = 2"):
        (tmp_path / "a.py").write_text(text)
        described.append(corpus.describe(str(tmp_path)))
    assert described[0]["files"] == 1
    assert described[0]["sha256"] != described[1]["sha256"]


def test_another_seed_takes_other_texts_of_a_folder(tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(name * 9)

    def taken(seed, count=3):
        return [(s.source, s.start) for s in corpus.samples(str(tmp_path), Letters(), count, 6, seed)]

    assert taken(0) == [("a.txt", 0), ("b.txt", 0), ("c.txt", 0)]
    assert len({tuple(taken(seed)) for seed in range(6)}) > 3
    # All files are there for every seed, and each has its turn before any has a second one.
    before = taken(5, 8)
    assert {name for name, _ in before} == {name for name, _ in taken(0, 8)}
    # The order of the others stays when a file goes.
    (tmp_path / "d.txt").unlink()
    assert taken(5, 7) == [text for text in before if text[0] != "d.txt"]


def test_another_seed_begins_each_file_elsewhere_and_still_reads_all_of_it():
    def places(seed, n_samples):
        return [(s.source, s.start) for s in corpus.samples("stdlib", Letters(), n_samples, 640, seed)]

    # A file of few pieces often begins alike; of equal seeds it would be all sixty.
    assert len({*places(0, 60)} & {*places(1, 60)}) < 20
    everything = places(1, 1000)
    assert len(everything) == len({*everything})
    starts = {source: sorted(start for name, start in everything if name == source) for source, _ in everything}
    # A file that has run out of pieces before the rounds ended was read whole.
    shortest = min(starts.values(), key=len)
    assert shortest == list(range(0, 640 * len(shortest), 640))


def test_every_experiment_is_another_run_at_another_seed_but_for_those_that_draw_nothing():
    # What reads no text and has one model of each kind: the bandwidth of memory, the atlas, and which kernels run.
    drawn = {name for name, one in catalogue.EXPERIMENTS.items() if one.fields is None or "seed" in one.fields}
    assert set(catalogue.EXPERIMENTS) - drawn == {"memory_bandwidth", "atlas", "kernels"}


def test_the_characters_of_another_seed_are_others_and_seed_0_begins_files_at_their_beginning():
    vocabulary = characters.Vocabulary.of(document.text for document in characters.documents("stdlib", "held-out"))
    one, same, other = (characters.samples("stdlib", vocabulary, 30, 200, seed) for seed in (0, 0, 1))
    assert one == same
    assert [sample.source for sample in one] == sorted(sample.source for sample in one)
    places, others = ({(sample.source, sample.start) for sample in of} for of in (one, other))
    assert {start for _, start in places} == {0} != {start for _, start in others}
    assert len(places & others) < 5
    assert all(len(sample.ids) == 200 for sample in (*one, *other))


def test_english_prose_is_long_in_sentences_counts_overlaps_once_and_mixes_its_kinds():
    texts = english.texts()
    assert len(texts) > 100
    assert {name.partition("/")[0] for name in texts} == {"topics", "README", "docstrings"}
    first = [document.name for document in corpus.documents("english")][:20]
    assert len({name.split("/")[1] for name in first if name.startswith("docstrings")}) > 2
    runs = [{tuple(words[i : i + 8]) for i in range(len(words))} for words in map(str.split, texts.values())]
    assert max(len(one & other) / min(len(one), len(other)) for one, other in combinations(runs, 2)) < 0.2
    assert {len(sample.ids) for sample in corpus.samples("english", Letters(), 60, 2000, seed=1)} == {2000}


def test_control_a_list_of_parameters_or_code_is_no_prose(monkeypatch, tmp_path):
    monkeypatch.setattr(english, "PACKAGES", ())
    prose = "".join(map("This is a sentence of more than seven words, number {}.\n".format, range(100)))
    code, parameters = ("".join(f"{line.format(i)}\n" for i in range(400)) for line in (">>> a = {}", "name_{} : int"))
    again = prose + "And one more.\n"
    named = {"a": prose, "again": again, "code": code, "parameters": parameters, "short": prose[:1000]}
    monkeypatch.setattr(english, "topics", named)
    assert list(english.texts.__wrapped__()) == ["topics/a"]


def test_conversations_stand_in_the_chat_template_share_only_that_and_a_model_without_one_is_refused():
    assert len(corpus.conversations()) >= 60
    tokenizer = loading.tokenizer("qwen2")
    (sample,) = corpus.samples("chat", tokenizer, 1, 24)
    answer = corpus.conversations()[sample.source]
    turns = [{"role": "user", "content": sample.source}, {"role": "assistant", "content": answer}]
    assert sample.ids == list(tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"])[:24]
    length = corpus.opening("chat", tokenizer)
    starts = [{tuple(one.ids) for one in corpus.samples("chat", tokenizer, 60, length + more)} for more in (0, 1)]
    assert len(starts[0]) == 1 < len(starts[1])
    assert corpus.opening("stdlib", tokenizer) == 0 < length
    tokenizer.chat_template = None
    assert "no chat template" in refusal(lambda: list(corpus.samples("chat", tokenizer, 1, 24)))


# Lengths.

@pytest.mark.parametrize(("given", "meant"), [
    (64, 64), ("64", 64), ("33-190", "33-190"), (" 33 - 190 ", "33-190"), ("40-40", 40),
])
def test_a_length_is_a_number_or_a_range(given, meant):
    assert LayerDriftSettings.checked(n_tokens=given).n_tokens == meant


@pytest.mark.parametrize(("given", "message"), [
    *((given, "a range of them such as 33-190") for given in ("long", "33-", "-5", True, 3.5, [33, 190])),
    ("190-33", "from its least to its largest"), ("1-9", "at least 2 tokens"), (0, "at least 2 tokens"),
])
def test_what_is_no_length_is_refused_in_one_line_that_names_the_parameter(given, message):
    said = refusal(LayerDriftSettings.checked, n_tokens=given)
    assert said.startswith("n_tokens = ")
    assert message in said
    assert said.count("n_tokens") == 1


@pytest.mark.parametrize(("settings", "fewest"), [
    (LayerDriftSettings, 2), (WhereDriftBeginsSettings, 3), (BugOrRoundingSettings, 4),
])
def test_the_chapters_ask_for_as_many_tokens_as_they_need(settings, fewest):
    assert settings.checked(n_tokens=f"{fewest}-9").n_tokens == f"{fewest}-9"
    assert f"at least {fewest} tokens" in refusal(settings.checked, n_tokens=f"{fewest - 1}-9")


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

    def texts(count, length="5-40"):
        return list(corpus.samples("stdlib" if kind == "stdlib" else str(tmp_path), Letters(), count, length, seed=4))

    few, many, whole = texts(3), texts(30), texts(30, 40)
    assert few == many[:3]
    assert [len(text.ids) for text in many] == [lengths.drawn("5-40", i, 4) for i in range(30)]
    assert [(text.source, text.start) for text in many] == [(text.source, text.start) for text in whole]
    assert all(text.ids == full.ids[: len(text.ids)] for text, full in zip(many, whole, strict=True))


def test_the_largest_length_of_a_range_must_fit_the_context(llama_folder, text_folder):
    def identified(n_tokens):
        settings = LayerDriftSettings.checked(model=str(llama_folder), corpus=str(text_folder), n_tokens=n_tokens)
        return samples.identities(settings, [settings.model], settings.n_tokens)

    assert identified("8-64")
    assert "65 tokens are more than the context" in refusal(identified, "8-65")
