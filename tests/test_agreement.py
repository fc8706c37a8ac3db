"""The comparison of two passes itself, and that it fails where it must."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import stats

from kvbook.measuring import UNIT_ROUNDOFF, agreement, predictions
from kvbook.measuring import full_and_split as passes


def test_drift_of_each_row_equals_what_one_computes_by_hand():
    first, second = torch.zeros(2, 3, 2, 4)
    first[1, 0], second[1, 0] = torch.tensor([3.0, -4.0, 0.0, 0.0]), torch.tensor([3.0, -2.0, 0.0, 1.0])
    found = agreement.drift(first, second)
    assert found.max_abs.tolist() == [[0, 0], [2, 0], [0, 0]]
    assert found.rms[1, 0].item() == pytest.approx(math.sqrt((0 + 4 + 0 + 1) / 4))
    assert found.reference_rms[1, 0].item() == pytest.approx(math.sqrt(25 / 4))
    assert found.relative_rms[1, 0].item() == pytest.approx(math.sqrt(5 / 25))
    assert found.differing_share.tolist() == [[0, 0], [0.5, 0], [0, 0]]


def test_one_differing_bit_of_a_16_bit_number_is_seen():
    first = torch.ones(8, dtype=torch.bfloat16)
    second = first.clone()
    second[3] = torch.nextafter(second[3], torch.tensor(2.0, dtype=torch.bfloat16))
    assert agreement.drift(first, second).differing_share.item() == 1 / 8


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
    assert math.isnan(agreement.decision(p.log() * math.nan, p.log()).kl_nats)
    equal = agreement.decision(p.log(), p.log())
    assert (equal.kl_nats, equal.top1_flip) == (0.0, False)


@pytest.fixture(params=["llama", "gpt2"])
def model(request):
    # In double precision rounding is so small that nothing else can hide behind it.
    return copy.deepcopy(request.getfixturevalue(request.param)).double()


def test_split_pass_agrees_with_the_full_pass_to_rounding_in_every_layer_and_the_embedding_does_not_drift(model, ids):
    full, split = passes.full_pass(model, ids), passes.split_pass(model, ids)
    assert full.hidden.shape == (model.config.num_hidden_layers + 1, 32)
    assert agreement.drift(full.logits, split.logits).relative_rms < 1e-12
    assert agreement.drift(full.hidden, split.hidden).relative_rms.max() < 1e-12
    assert torch.equal(full.hidden[0], split.hidden[0])


def a_position_late(model, ids):
    cache, position = passes.prefill(model, ids[:, :-1]), torch.tensor([[ids.shape[1] - 2]])
    return model(ids[:, -1:], past_key_values=cache, position_ids=position).logits[0, -1]


WRONG = {
    "a cache one step late":
        lambda model, ids: passes.decode(model, ids[:, -1:], passes.prefill(model, ids[:, :-2])).logits,
    "a wrong token": lambda model, ids: passes.split_pass(model, ids + (torch.arange(ids.shape[1]) == 3)).logits,
    "a shifted position": a_position_late,
}


@pytest.mark.parametrize("mistake", WRONG)
def test_control_a_mistake_is_seen(model, ids, mistake):
    assert agreement.drift(passes.full_pass(model, ids).logits, WRONG[mistake](model, ids)).relative_rms > 1e-6


# What is kept of two rows of logits is what arithmetic with more digits gives.

def streams(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    first = 4 * torch.randn(24, 300, generator=generator)
    second = first + scale * torch.randn(24, 300, generator=generator)
    return first, second, torch.randint(0, 300, (24,), generator=generator)


def with_more_digits(first, second, targets):
    """Log probabilities in 80 bits, and from them divergence and the true token's change."""
    rows = [tensor.double().numpy().astype(np.longdouble) for tensor in (first, second)]
    one, two = (row - np.log(np.exp(row).sum(-1, keepdims=True)) for row in rows)
    at = np.arange(len(targets)), targets.numpy()
    return (np.exp(one) * (one - two)).sum(-1), (two - one)[at], -one[at]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_stream_against_itself_has_no_divergence_and_no_flip(dtype):
    first, _, targets = streams(0)
    found = predictions.compare(first.to(dtype), first.to(dtype), targets)
    for name in ("kl", "dlogp", "flip", "shift"):
        assert getattr(found, name).abs().max() == 0, name


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2, 1.0, 5.0, 60.0])
def test_small_and_large_differences_come_out_as_with_more_digits(scale):
    first, second, targets = streams(scale)
    found = predictions.compare(first, second, targets)
    kl, dlogp, nll = with_more_digits(first, second, targets)
    assert found.kl.numpy() == pytest.approx(kl.astype(float), rel=2e-3)
    assert found.dlogp.numpy() == pytest.approx(dlogp.astype(float), rel=1e-3, abs=1e-3 * scale)
    assert found.nll.numpy() == pytest.approx(nll.astype(float), rel=1e-4, abs=1e-5)


def test_control_two_softmaxes_in_32_bits_lose_a_small_divergence():
    first, second, targets = streams(1e-6)
    one, two = (torch.log_softmax(logits, -1) for logits in (first, second))
    naive = (one.exp() * (one - two)).sum(-1).numpy()
    kl, *_ = with_more_digits(first, second, targets)
    assert np.median(abs(naive / kl.astype(float) - 1)) > 1


def test_16_bit_logits_are_compared_as_the_numbers_that_they_are():
    first, second, targets = (x.bfloat16() if x.is_floating_point() else x for x in streams(0.1))
    narrow, wide = (predictions.compare(a, b, targets) for a, b in ((first, second), (first.float(), second.float())))
    assert torch.equal(narrow.kl, wide.kl)
    assert (narrow.ulp / wide.ulp == 2**16).all()


def test_the_second_overtakes_the_first_where_the_shift_is_larger_than_the_margin():
    first = torch.tensor([[3.0, 2.0, 0.0], [3.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    second = torch.tensor([[3.0, 2.5, 0.0], [2.0, 2.5, 0.0], [3.5, 2.0, 4.0]])
    found = predictions.compare(first, second, torch.tensor([0, 0, 0]))
    assert found.margin.tolist() == [1, 1, 1]
    assert found.shift.tolist() == [-0.5, -1.5, 0.5]
    # The last one flips to a third token, which the shift between the first two does not tell.
    assert found.flip.tolist() == [0, 1, 1]


def test_the_spacing_is_the_distance_to_the_next_number():
    values = torch.tensor([1.0, 1.5, 2.0, 100.0, 7e-3])
    upwards = torch.nextafter(values, torch.tensor(torch.inf)) - values
    assert torch.equal(predictions.spacing(values), upwards.double())
    assert predictions.spacing(torch.tensor([-3.0, 20.0], dtype=torch.bfloat16)).tolist() == [2**-6, 2**-3]


def test_common_noise_draws_from_the_softmax_and_depends_on_its_name_alone():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = [int((logits + predictions.gumbel(0, 3, step, 4)).argmax()) for step in range(4000)]
    counts = np.bincount(drawn, minlength=4)
    assert stats.chisquare(counts, 4000 * torch.softmax(logits.double(), -1).numpy()).pvalue > 1e-3
    # Control: the same draws are not those of a flat distribution.
    assert stats.chisquare(counts).pvalue < 1e-9
    assert torch.equal(predictions.gumbel(1, 2, 3, 9), predictions.gumbel(1, 2, 3, 9))
    assert not torch.equal(predictions.gumbel(1, 2, 3, 9), predictions.gumbel(1, 2, 4, 9))


def test_rows_that_are_compared_in_parts_are_those_compared_at_once(monkeypatch):
    first, second, targets = streams(0.1)
    at_once = predictions.compare(first, second, targets)
    monkeypatch.setattr(predictions, "_AT_ONCE", 7 * first.shape[-1])
    assert predictions.compare(first, second, targets).rows() == at_once.rows()
    # A row keeps six digits.
    assert at_once.rows()[3]["kl"] == pytest.approx(at_once.kl[3].item(), rel=1e-5)


def test_rows_that_do_not_belong_together_are_refused():
    first, second, targets = streams(0.1)
    for others, tokens, words in ((second[:1], targets, "against"), (second, targets[:1], "targets")):
        with pytest.raises(ValueError, match=words):
            predictions.compare(first, others, tokens)
