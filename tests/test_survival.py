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
    found = survival.still_together(*watched, step)
    assert found.low < (1 - HAZARD) ** step < found.high
    assert found.low < found.value < found.high


def test_control_leaving_out_the_censored_ones_would_miss_it(watched):
    steps, parted = watched
    assert survival.still_together(steps[parted], parted[parted], 20).high < (1 - HAZARD) ** 20


def test_a_small_example_by_hand():
    found = [survival.still_together([1, 2, 2, 3, 4], [1, 1, 0, 0, 1], step).value for step in (0, 1, 2, 3, 4)]
    # 5 at risk at 1, 4 at 2, 1 at 4.
    assert found == pytest.approx([1, 4 / 5, 3 / 5, 3 / 5, 0])


@pytest.mark.parametrize("n", [3, 60])
def test_none_and_all_have_one_two_sided_interval_in_a_curve_as_in_a_share(n):
    together, apart = estimates.wilson(1.0, n), estimates.wilson(0.0, n)
    assert survival.still_together([9] * n, [0] * n, 9) == survival.still_together([5] * n, [1] * n, 4) == together
    assert survival.still_together([5] * n, [1] * n, 5) == apart
    assert 1 - together.low == pytest.approx(apart.high)
