"""The survival curve finds a hazard that is known."""

import numpy as np
import pytest

from kvbook.measuring import survival

HAZARD = 0.05


@pytest.fixture(scope="module")
def watched():
    generator = np.random.default_rng(1)
    parts, ends = generator.geometric(HAZARD, 3000), generator.integers(1, 60, 3000)
    return np.minimum(parts, ends), parts <= ends


@pytest.mark.parametrize("step", [5, 20, 40])
def test_a_known_hazard_lies_in_the_interval(watched, step):
    share, low, high = survival.kaplan_meier(*watched).at(step)
    assert low < (1 - HAZARD) ** step < high
    assert low < share < high


def test_control_leaving_out_the_censored_ones_would_miss_it(watched):
    steps, parted = watched
    kept = survival.kaplan_meier(steps[parted], parted[parted])
    assert kept.at(20)[2] < (1 - HAZARD) ** 20


def test_a_small_example_by_hand():
    curve = survival.kaplan_meier([1, 2, 2, 3, 4], [1, 1, 0, 0, 1])
    # 5 at risk at 1, 4 at 2, 1 at 4.
    assert [curve.at(step)[0] for step in (0, 1, 2, 3, 4)] == pytest.approx([1, 4 / 5, 3 / 5, 3 / 5, 0])
    assert curve.median() == 4
    assert (curve.pairs, curve.parted) == (5, 3)


def test_where_none_part_the_bound_is_that_of_no_event_in_n():
    curve = survival.kaplan_meier([9, 9, 4], [0, 0, 0])
    assert curve.at(9)[0] == 1
    # A share of together below this would have shown a parting in 3 pairs with a probability of 95 %.
    assert curve.at(9)[1] == pytest.approx(0.05 ** (1 / 3))
    assert curve.median() == float("inf")
