"""The comparison itself, and that it fails where it must."""

import copy

import pytest
import torch

from kvbook.measuring import agreement
from kvbook.measuring import full_and_split as passes


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
