"""The measures of two sets of log-probabilities, against sums over a whole vocabulary and against known values."""

import numpy as np
import pandas as pd
import pytest

from kvbook.scores import measures

RNG = np.random.default_rng(45)
ROLLOUT, TRAINER = (np.log(row / row.sum()) for row in RNG.dirichlet(np.full(12, 2.0), size=2))
LOG_RATIO = TRAINER - ROLLOUT
KL = float((np.exp(ROLLOUT) * -LOG_RATIO).sum())


def expected(name: str) -> float:
    """Take the mean of a term over the rollout's own distribution."""
    return float((np.exp(ROLLOUT) * measures.TERMS[name](LOG_RATIO)).sum())


def test_equal_log_probabilities_have_ratio_one_and_no_distance():
    found = measures.summary(np.zeros(6), [0, 0, 0, 1, 1, 1])
    ones = {"mean_exp_abs", "effective_share", "sequence_effective_share"} | {
        name for name in found if name.startswith("sequence_ratio")
    }
    assert found == {name: float(name in ones) for name in found}


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean_over_all_tokens(name):
    assert expected(name) == pytest.approx(KL)


def test_control_k2_has_a_bias():
    assert expected("k2") != pytest.approx(KL)


def test_chi_squared_is_that_of_the_two_distributions():
    divided = np.square(np.exp(TRAINER) - np.exp(ROLLOUT)) / np.exp(ROLLOUT)
    assert expected("chi_squared") == pytest.approx(divided.sum())


def test_k3_of_a_tiny_difference_keeps_its_digits():
    assert measures.k3(1e-7) == pytest.approx(0.5e-14, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "narrow", "clip"), [(1.09, 0, 0), (0.89, 1, 0), (1.11, 1, 0), (0.79, 1, 1), (1.21, 1, 1)]
)
def test_a_ratio_is_outside_by_its_distance_from_one_on_both_sides(ratio, narrow, clip):
    found = measures.summary([np.log(ratio)], ["a"])
    assert (found["outside_narrow"], found["outside_ppo_clip"]) == (narrow, clip)


def test_the_ratio_of_a_sequence_is_the_product_of_its_tokens_wherever_they_stand():
    sums = measures.of_sequences(np.log([2.0, 3.0, 5.0, 7.0]), ["b", "a", "b", "a"])
    assert np.exp(sums) == pytest.approx([21.0, 10.0])


def test_one_weight_that_outweighs_all_leaves_one_effective_sample():
    assert measures.effective_share([900.0, 0.0, 0.0, 0.0]) == 0.25
    assert measures.effective_share(np.minimum([900.0, 0.0, 0.0, 0.0], np.log(2))) > 0.75


def test_a_common_factor_of_all_weights_cancels():
    assert measures.effective_share(LOG_RATIO) == pytest.approx(measures.effective_share(LOG_RATIO - 3))


def test_a_term_of_a_column_is_a_column():
    column = pd.Series(LOG_RATIO, index=range(5, 17))
    assert all(len(term(column)) == 12 for term in measures.TERMS.values())
    assert measures.outside(column, measures.NARROW).index.equals(column.index)
