"""The comparison itself, and that it fails where it must."""

import pytest
import torch

from kvbook.measuring import agreement
from kvbook.measuring import full_and_split as passes


def relative(full: passes.LastToken, split: passes.LastToken) -> float:
    return agreement.drift(full.logits, split.logits).relative_rms.item()


@pytest.fixture(params=["llama", "gpt2"])
def model(request):
    # In double precision rounding is so small that nothing else can hide behind it.
    import copy

    return copy.deepcopy(request.getfixturevalue(request.param)).double()


ROUNDING = 1e-12


def test_split_pass_agrees_with_the_full_pass_to_rounding(model, ids):
    assert relative(passes.full_pass(model, ids), passes.split_pass(model, ids)) < ROUNDING


def test_a_cache_one_step_late_is_seen(model, ids):
    late = passes.decode(model, ids[:, -1:], passes.prefill(model, ids[:, :-2]))
    assert relative(passes.full_pass(model, ids), late) > 1e6 * ROUNDING


def test_a_wrong_token_is_seen(model, ids):
    wrong = ids.clone()
    wrong[0, 3] += 1
    assert relative(passes.full_pass(model, ids), passes.split_pass(model, wrong)) > 1e6 * ROUNDING


def test_a_shifted_position_is_seen(model, ids):
    cache = passes.prefill(model, ids[:, :-1])
    position = torch.tensor([[ids.shape[1] - 2]])
    output = model(ids[:, -1:], past_key_values=cache, position_ids=position, output_hidden_states=True)
    shifted = passes.LastToken(torch.stack([h[0, -1] for h in output.hidden_states]), output.logits[0, -1])
    assert relative(passes.full_pass(model, ids), shifted) > 1e6 * ROUNDING


def test_hidden_states_are_those_of_every_layer_and_the_embedding(model, ids):
    full = passes.full_pass(model, ids)
    assert full.hidden.shape == (model.config.num_hidden_layers + 1, 32)
    assert full.logits.shape == (320,)


def test_the_embedding_does_not_drift(model, ids):
    full, split = passes.full_pass(model, ids), passes.split_pass(model, ids)
    assert torch.equal(full.hidden[0], split.hidden[0])
