"""The chapter on exact caches: its rows are what the ways give, and statements fail on rows that contradict them."""

import functools

import pytest
import torch
from made_up import changed
from transformers import DynamicCache

from kvbook.exact.verification import fed
from kvreport.chapters.exact_caches import ExactCachesSettings, cost, lengths, measures, paths
from kvreport.chapters.exact_caches.rows import ALL, RUNGS
from kvreport.publishing import found as found_in
from kvreport.publishing.measures import named, written
from kvreport.publishing.wording import percent

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return ExactCachesSettings.checked(
        model=str(llama_folder), families=[str(llama_folder), str(gpt2_folder)], corpus=str(text_folder), n_samples=2,
        n_tokens=12, lengths=[24], threads=[1, 2], dtypes=["bfloat16"], n_prefill=12, n_context=6, n_steps=2,
    )


@pytest.fixture(scope="module")
def measured(settings, llama):
    with pytest.MonkeyPatch.context() as patch:
        # The full-size architecture takes seconds to build, and only its time is of interest.
        patch.setattr(cost, "_blank", lambda _settings: llama)
        return found_in.measured("exact_caches", settings)


def test_every_way_is_measured_under_both_arithmetics(measured):
    rows = measured["exact_ways"]
    assert not rows.duplicated(["model", "dtype", "sample", "arithmetic", "way"]).any()
    assert len(rows) == 2 * 2 * 2 * 7


@pytest.mark.parametrize("length", [2, 17, 300, 2049])
def test_uneven_chunks_make_up_a_text_of_any_length_wherever_they_begin(length):
    cuts = [lengths.uneven(length, first) for first in range(len(lengths.CHUNKS))]
    assert {sum(sizes) for sizes in cuts} == {length}
    assert all(max(sizes) < length for sizes in cuts)
    assert set(lengths.CHUNKS) <= set().union(*cuts) or length < max(lengths.CHUNKS)


def test_long_texts_are_fed_at_every_length_and_thread_count(settings, measured):
    two = settings.model_copy(update={"lengths": (9, 40)})
    assert [lengths.plan(two, text)[:2] for text in range(4)] == [(9, 1), (40, 1), (9, 2), (40, 2)]
    rows = measured["exact_lengths"]
    assert set(zip(rows["rows"], rows["n_tokens"], rows["threads"], strict=True)) == {(24, 24, 1), (24, 24, 2)}


def test_one_row_of_one_chunk_that_differs_in_one_bit_is_counted(llama, ids):
    sizes = lengths.uneven(ids.shape[1], 0)
    cache = functools.partial(DynamicCache, config=llama.config)
    full = fed(llama, ids, sizes, cache())
    assert lengths._fed_against(full, llama, ids, sizes, cache())["equal_rows"] == ids.shape[1]
    full[-2, 3] = torch.nextafter(full[-2, 3], torch.tensor(99.0))
    found = lengths._fed_against(full, llama, ids, sizes, cache())
    assert (found["rows"], found["equal_rows"]) == (ids.shape[1], ids.shape[1] - 1)
    assert 0 < found["max_abs"] < 1e-6


def test_every_rung_is_measured_and_the_last_one_is_exact(measured):
    table = measured["rungs"]
    assert tuple(dict.fromkeys(table["rung"])) == tuple(paths.RUNGS) == RUNGS
    assert (table.loc[table["rung"] == ALL, "share"] == 1).all()
    assert (table["error"] > 0).all()


def test_the_errors_of_the_full_pass_and_of_the_steps_are_told_apart(llama, ids, monkeypatch):
    true = llama(ids, use_cache=False).logits[0].double()
    sound, fed = paths._score(llama, None, ids, true), paths.fed
    monkeypatch.setattr(paths, "fed", lambda *arguments: fed(*arguments) + 1.0)
    harmed = paths._score(llama, None, ids, true)
    assert harmed["error_rms"] == sound["error_rms"] < 1e-3
    assert sound["step_error_rms"] < 1e-3 < harmed["step_error_rms"]


def test_the_timed_prefill_scores_the_last_token_from_a_copy_of_its_row(llama, ids, monkeypatch):
    strides = []
    monkeypatch.setattr(
        llama.lm_head, "forward", lambda x, own=llama.lm_head.forward: strides.append(x.stride()) or own(x)
    )
    torch.testing.assert_close(cost.prefill(llama, ids), llama(ids, logits_to_keep=1).logits)
    assert strides[0] == (32, 32, 1)


@pytest.mark.parametrize(("share", "said"), [(0, "0%"), (0.001, "<1%"), (0.999, ">99%"), (1, "100%"), (0.404, "40%")])
def test_some_rows_are_not_rounded_to_none_and_most_not_to_all(share, said):
    assert percent(share) == said


def test_row_invariant_rows_are_all_equal_and_those_of_the_real_model_are_counted_apart_from_the_stand_ins(measured):
    def number(role, found):
        return written(f"{role} count", named(measures), found)

    # Two texts of 12 tokens; six ways score all rows, and `generate` half of them.
    assert number("EXACT_ROWS", measured) == number("EXACT_ROWS_OF_OTHERS", measured) == "156 of 156"
    assert number("EXACT_ROWS_AT_LENGTH", measured) == "144 of 144"
    # Control: a row of a stand-in that differs is no row of the real model.
    fewer = changed(measured, "exact_ways", "index == index.max()", equal_rows=5)
    assert number("EXACT_ROWS", fewer) == "156 of 156"
    assert number("EXACT_ROWS_OF_OTHERS", fewer) == "155 of 156"
