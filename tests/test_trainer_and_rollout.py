"""The chapter on trainer and rollout, on a stand-in."""

import numpy as np
import pytest
import torch
from made_up import run_of

from kvbook.models import loading
from kvreport.chapters.trainer_and_rollout import TrainerAndRolloutSettings, measures, policy_gradient, rollouts, tables
from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.publishing import found

SETTINGS = TrainerAndRolloutSettings(n_samples=3, prompt_tokens=8, new_tokens=12)


@pytest.fixture(scope="module")
def written():
    return rollouts.EXPERIMENT.run(SETTINGS).rows


@pytest.fixture(scope="module")
def by_way(written):
    return rollouts.WAYS.run(SETTINGS).rows


def estimate(measure, written, compared):
    (one,) = measure.where(compared=compared)(found_in(written))
    return one.estimate.value


def found_in(written, **changed):
    return found.of_runs("trainer_and_rollout", {"rollout": run_of(written, settings=SETTINGS.model_dump() | changed)})


@pytest.mark.parametrize("at_once", [1, 5, 64])
def test_on_a_cache_every_token_has_the_log_probability_of_one_pass(texts, at_once):
    model = loading.load("llama", dtype="float32").model
    with torch.inference_mode():
        expected = rollouts.one_pass(model, "x", texts, 8)["x"]
        on_cache = rollouts.cached(model, "x", texts, 8, at_once)["x"]
        assert expected.shape == on_cache.shape == (3, 13)
        assert torch.allclose(expected, on_cache, atol=1e-4)
        assert torch.allclose(expected, rollouts.padded(model, "x", texts, 8)["x"], atol=1e-4)
        # Control: the text before or behind, and the token beside, would not pass.
        assert not torch.allclose(expected, on_cache.roll(1, 0), atol=1e-1)
        assert not torch.allclose(expected, on_cache.roll(1, 1), atol=1e-1)


def test_processed_log_probabilities_are_those_of_the_distribution_that_sampling_draws_from():
    logits = torch.randn(2, 1, 400, generator=torch.Generator().manual_seed(1))
    for token in range(0, 400, 37):
        columns = rollouts.processed(logits, torch.full((2, 1), token))
        for row in range(2):
            ordered = logits[row, 0].softmax(-1).double().sort(descending=True).values
            kept = ordered[: int((ordered.cumsum(0) < named.TOP_P).sum()) + 1]
            assert columns[named.MASS_P][row, 0].exp().item() == pytest.approx(kept.sum().item(), rel=1e-5)
            own = logits[row, 0].softmax(-1)[token].item()
            assert columns[named.IN_P][row, 0] == (own >= kept[-1].item() * (1 - 1e-6))
            assert columns[named.IN_K][row, 0] == (own >= ordered[named.TOP_K - 1].item() * (1 - 1e-6))
            cooled = (logits[row, 0] / named.TEMPERATURE).log_softmax(-1)[token].item()
            assert columns[named.COOLED][row, 0].item() == pytest.approx(cooled, rel=1e-5)


def test_texts_are_sampled_and_end_at_the_token_that_ends_them(written):
    assert written.groupby("sample").size().tolist() == [12, 12, 12]
    assert written.groupby("sample")["token"].nunique().min() > 3
    rows = rollouts.rows_of(rollouts.prompts(SETTINGS)[:1], torch.tensor([[5, 6, 7, 8]]), {"x": torch.zeros(1, 4)}, {7})
    assert [row["token"] for row in rows] == [5, 6, 7]


def test_in_bf16_trainer_and_rollout_differ_and_a_fault_differs_far_more(written):
    rounding, fault = (estimate(measures.MEAN_ABS, written, which) for which in (named.BF16, named.SHIFTED))
    assert 1e-4 < rounding < 0.1 < fault


def test_control_a_shifted_log_probability_is_found(written):
    before = estimate(measures.OUTSIDE, written, named.BF16)
    assert before < 0.5 < estimate(measures.OUTSIDE, written.assign(trainer=written["trainer"] + 0.2), named.BF16) == 1


def test_tables_name_the_texts_and_the_dtype_of_the_rollout(written):
    table = tables.by_texts({"": found_in(written, dtype="float16", corpus="/of/mine")})
    assert table["texts"].tolist() == ["another corpus"]
    assert [name[-12:] for name in table][-2:] == ["fp16 trainer", "fp32 trainer"]


def test_sequences_are_read_no_further_than_the_longest_text_goes(written):
    assert set(tables.sequences({"": found_in(written)})["length"]) == {1, 2, 4, 8, written["position"].max() + 1}


def test_the_ways_score_the_rollouts_own_tokens(written, by_way):
    assert by_way["token"].tolist() == written["token"].tolist()
    assert np.array_equal(by_way[named.TRAINER_FP32], written[named.TRAINER_FP32])
    far = {way: np.abs(by_way[way] - by_way[named.TRAINER_FP64]).max() for way in rollouts.SCORES}
    assert max(far[named.ROLLOUT_FP32], far[named.TRAINER_FP32]) < 1e-4 < far[named.CHUNKS] < far[named.INT4]


def test_row_invariant_arithmetic_gives_both_sides_the_same_bits(by_way):
    assert (by_way[named.INVARIANT_ROLLOUT] == by_way[named.INVARIANT_TRAINER]).all()
    # Control: in stock arithmetic they differ.
    assert (by_way[named.SINGLE] != by_way[named.PADDED]).any()


@pytest.mark.slow
def test_arms_begin_alike_and_a_policy_learns():
    settings = {n_updates: SETTINGS.model_copy(update={"n_updates": n_updates}) for n_updates in (4, 2, 1)}
    first, second = (policy_gradient.train(settings[n_updates], 0, named.MATCHED) for n_updates in (4, 2))
    faulty = policy_gradient.train(settings[1], 0, named.FAULTY)
    assert first[:2] == second
    assert first[-1]["reward"] > first[0]["reward"]
    # Matched log-probabilities differ by rounding in fp32; those of the fault are of another token.
    assert first[0]["mean_abs"] < 1e-4 < 0.5 < faulty[0]["mean_abs"]
    assert first[0]["effective_share"] == 1 > faulty[0]["effective_share"]
