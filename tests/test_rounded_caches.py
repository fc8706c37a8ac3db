"""A rounded cache gives back what integers of a few bits hold."""

import pytest
import torch
from transformers import MistralConfig

from kvbook.errors import UserError
from kvbook.measuring import rounded_caches

STATES = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("width", "block"), [(64, 32), (20, 20)])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_number_is_within_half_a_step_and_a_block_has_few_levels(bits, width, block):
    states = STATES[..., :width]
    found = rounded_caches.rounded(states, bits)
    blocks, back = (x.unflatten(-1, (-1, block)) for x in (states, found))
    step = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((back - blocks).abs() <= step / 2 * 1.0001).all()
    levels = back / step
    assert levels.round().abs().max() == 2 ** (bits - 1) - 1
    assert torch.allclose(levels, levels.round(), atol=1e-3)


def test_fewer_bits_are_further_off_rounding_twice_changes_nothing_and_zeros_stay_zeros():
    errors = [(rounded_caches.rounded(STATES, bits) - STATES).square().mean() for bits in (8, 6, 4, 2)]
    assert errors == sorted(errors)
    once = rounded_caches.rounded(STATES, 8)
    assert torch.allclose(rounded_caches.rounded(once, 8), once, rtol=1e-6)
    assert rounded_caches.rounded(torch.zeros(1, 1, 1, 32), 4).abs().max() == 0


def test_what_enters_comes_back_rounded_once(llama, ids):
    cache, plain = rounded_caches.make(llama.config, 4), rounded_caches.make(llama.config, 24)
    with torch.inference_mode():
        for part in ids.split(9, 1):
            llama(part, past_key_values=cache, use_cache=True)
        llama(ids, past_key_values=plain, use_cache=True)
    assert cache.get_seq_length() == ids.shape[1]
    # The first layer's keys depend on no attention: there the cache holds exactly the rounded keys.
    held, exact = cache.layers[0].keys, plain.layers[0].keys
    assert torch.allclose(held, rounded_caches.rounded(exact, 4), atol=1e-4)
    assert not torch.allclose(held, exact, atol=1e-2)


def test_layers_with_a_window_are_refused():
    with pytest.raises(UserError, match="window"):
        rounded_caches.make(MistralConfig(num_hidden_layers=1, sliding_window=8), 8)
