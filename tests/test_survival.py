"""The survival curve finds a hazard that is known."""

import numpy as np
import pytest

from kvbook.measuring import estimates, survival

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


@pytest.mark.parametrize("n", [3, 60])
def test_none_and_all_have_one_two_sided_interval_in_a_curve_as_in_a_share(n):
    none, every = survival.kaplan_meier([9] * n, [0] * n), survival.kaplan_meier([5] * n, [1] * n)
    together, apart = estimates.wilson(1.0, n), estimates.wilson(0.0, n)
    for curve, step in ((none, 9), (every, 4)):
        assert curve.at(step) == (1, together.low, 1)
    assert every.at(5) == (0, 0, apart.high)
    assert 1 - together.low == pytest.approx(apart.high)
    assert none.median() == float("inf")
