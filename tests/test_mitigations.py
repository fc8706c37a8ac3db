import copy
from unittest.mock import Mock

import pytest
import torch
from refusing import refusal

from kvbook.measuring import full_and_split as passes
from kvbook.measuring import mitigations

EACH = pytest.mark.parametrize("name", mitigations.NAMES[1:])


@pytest.fixture
def model(llama):
    return copy.deepcopy(llama).to(torch.bfloat16)


def full(model, ids):
    with torch.inference_mode():
        return passes.full_pass(model, ids).logits


@EACH
def test_each_switch_is_used_while_it_is_on_and_gone_afterwards_even_after_an_error(model, ids, name):
    before = full(model, ids)
    spies = [(owner, attribute, Mock(wraps=by)) for owner, attribute, by in mitigations.prepare(model, name)]
    with pytest.raises(RuntimeError, match="320"), mitigations.applied(spies):
        raise RuntimeError(str(full(model, ids).shape))
    assert all(spy.called for *_, spy in spies)
    for *_, spy in spies:
        spy.reset_mock()
    assert torch.equal(before, full(model, ids))
    assert not any(spy.called for *_, spy in spies)


def test_attention_in_fp32_reaches_the_cache_and_changes_the_result(model, ids):
    with mitigations.applied(mitigations.prepare(model, "whole attention")), torch.inference_mode():
        during, cache = full(model, ids), passes.prefill(model, ids)
    assert cache.layers[0].keys.dtype == torch.float32
    assert not torch.equal(full(model, ids), during)


@EACH
def test_an_upcast_of_what_is_fp32_already_changes_nothing_but_rounding(llama, ids, name):
    with mitigations.applied(mitigations.prepare(llama, name)):
        during = full(llama, ids)
    assert torch.allclose(during, full(llama, ids), rtol=0, atol=1e-5)


def test_stock_is_untouched_and_other_names_and_models_are_refused(model, gpt2):
    assert mitigations.prepare(model, mitigations.STOCK) == []
    assert "no mitigation 'magic'" in refusal(mitigations.prepare, model, "magic")
    assert "gpt2 has other modules" in refusal(mitigations.prepare, gpt2, "rotary")
