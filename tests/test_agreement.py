import math

import pytest
import torch

from kvbook.measuring import agreement
from kvbook.measuring.roundoff import UNIT_ROUNDOFF


def test_drift_equals_what_one_computes_by_hand():
    found = agreement.drift(torch.tensor([3.0, -4.0, 0.0, 0.0]), torch.tensor([3.0, -2.0, 0.0, 1.0]))
    assert found.max_abs.item() == 2.0
    assert found.rms.item() == pytest.approx(math.sqrt((0 + 4 + 0 + 1) / 4))
    assert found.reference_rms.item() == pytest.approx(math.sqrt(25 / 4))
    assert found.relative_rms.item() == pytest.approx(math.sqrt(5 / 25))
    assert found.differing_share.item() == 0.5


def test_drift_keeps_leading_dimensions_apart():
    first = torch.zeros(3, 2, 4)
    second = first.clone()
    second[1, 0, 2] = 7
    assert agreement.drift(first, second).max_abs.tolist() == [[0, 0], [7, 0], [0, 0]]


def test_one_differing_bit_of_a_16_bit_number_is_seen():
    first = torch.ones(8, dtype=torch.bfloat16)
    second = first.clone()
    second[3] = torch.nextafter(second[3], torch.tensor(2.0, dtype=torch.bfloat16))
    assert agreement.drift(first, second).differing_share.item() == 1 / 8
    assert agreement.drift(first, first).differing_share.item() == 0


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        agreement.drift(torch.zeros(3, 4), torch.zeros(4))


def test_unit_roundoff_is_half_of_torchs_epsilon():
    for name, roundoff in UNIT_ROUNDOFF.items():
        assert roundoff == torch.finfo(getattr(torch, name)).eps / 2


def test_decision_equals_what_one_computes_by_hand():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.5, 0.2])
    found = agreement.decision(p.log(), q.log())
    assert found.kl_nats == pytest.approx(0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.5), rel=1e-6)
    assert found.top1_flip
    assert found.margin == pytest.approx(math.log(0.5 / 0.3), rel=1e-6)
    equal = agreement.decision(p.log(), p.log())
    assert (equal.kl_nats, equal.top1_flip) == (0.0, False)


@pytest.mark.parametrize(
    ("reference", "other", "step"), [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2, 3], [1, 2], None)]
)
def test_first_divergence_is_the_first_differing_place(reference, other, step):
    assert agreement.first_divergence(reference, other) == step
