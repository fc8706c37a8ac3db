"""Safe reuse of a cache, and rounded caches, on models made on the spot."""

import copy

import pytest
import torch
from refusing import refusal
from small_models import generated
from transformers import DynamicCache, MistralConfig

from kvbook.measuring import caches, rounded_caches

KINDS = pytest.mark.parametrize("kind", ["dynamic", "static"])


def filled(model, ids, kind, room=96):
    cache = caches.make(kind, model.config, room)
    with torch.inference_mode():
        return model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values


def written(model, ids, cache=None, n=8):
    output = generated(model, torch.tensor([ids]), n, past_key_values=cache, disable_compile=True)
    return output.sequences[0, len(ids) :].tolist(), caches.length(output.past_key_values)


@pytest.fixture
def prompt(ids):
    return ids[0, :12].tolist()


@pytest.fixture
def other(ids):
    """The same beginning, another id at place 8, and more after it: what a seam makes of a longer text."""
    row = ids[0].tolist()
    return [*row[:8], row[20], *row[12:20]]


@KINDS
def test_what_is_reused_is_a_copy_of_the_common_prefix_bit_for_bit(llama, prompt, other, kind):
    cache = filled(llama, prompt, kind)
    before, reused = copy.deepcopy(cache), caches.reusable(cache, prompt, other)
    assert (caches.length(cache), caches.length(reused)) == (len(prompt), 8)
    written(llama, other, reused)
    for old, kept, new in zip(before.layers, cache.layers, reused.layers, strict=True):
        assert torch.equal(old.keys, kept.keys), "the cache itself is left as it was"
        assert torch.equal(old.keys[:, :, :8], new.keys[:, :, :8])
        assert torch.equal(old.values[:, :, :8], new.values[:, :, :8])
    if kind == "static":
        assert not any(layer.keys[:, :, 8:].any() for layer in caches.reusable(cache, prompt, other).layers)


@KINDS
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_safe_reuse_writes_the_tokens_of_no_reuse_and_reuse_as_it_is_does_not(request, prompt, other, kind, model):
    model = request.getfixturevalue(model)
    cache = filled(model, prompt, kind, room=60)
    # Another prompt, the same one, a part of it, and one with nothing in common.
    for wanted in (other, prompt, prompt[:5], [prompt[0] - 1, *other[1:]]):
        assert written(model, wanted, caches.reusable(cache, prompt, wanted)) == written(model, wanted)
    # Control: the cache as it is holds the tokens of another prompt from place 8 on.
    assert written(model, other, copy.deepcopy(cache))[0] != written(model, other)[0]
    # Control: where it holds the whole prompt, transformers 5.23 says nothing and feeds that on top of itself.
    (expected, length), (tokens, twice) = written(model, prompt), written(model, prompt, copy.deepcopy(cache))
    assert twice == length + len(prompt)
    assert tokens != expected


def test_what_cannot_be_reused_is_refused_in_one_line(llama, prompt, other):
    cache = filled(llama, prompt, "dynamic")
    window = DynamicCache(config=MistralConfig(num_hidden_layers=1, sliding_window=4))
    window.update(torch.zeros(1, 2, 12, 4), torch.zeros(1, 2, 12, 4), 0)
    for held, ids, wanted, message in (
        (cache, prompt[:-1], other, "holds 12 tokens"), (cache, prompt, [], "empty prompt"),
        (window, prompt, other, "DynamicSlidingWindowLayer cannot be cut back"),
    ):
        assert message in refusal(caches.reusable, held, ids, wanted)
    assert "'offloaded'" in refusal(caches.make, "offloaded", llama.config, 4)


# Rounded caches: they give back what integers of a few bits hold.

STATES = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("width", "block"), [(64, 32), (20, 20)])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_number_is_within_half_a_step_and_a_block_has_few_levels(bits, width, block):
    states = STATES[..., :width]
    blocks, back = (x.unflatten(-1, (-1, block)) for x in (states, rounded_caches.rounded(states, bits)))
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


def test_what_enters_comes_back_rounded_once_and_keys_can_be_rounded_without_values(llama, ids):
    held = []
    for bits in ((None, None), (4, 4), (4, None)):
        cache = rounded_caches.make(llama.config, *bits)
        for part in ids.split(9, 1):
            llama(part, past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == ids.shape[1]
        # Those of the first layer depend on no attention, and so on no rounding before.
        held.append((cache.layers[0].keys, cache.layers[0].values))
    keys, values = held[0]
    rounded = [rounded_caches.rounded(states, 4) for states in held[0]]
    assert not torch.allclose(rounded[0], keys, atol=1e-2)
    assert all(map(torch.equal, held[1], rounded))
    assert all(map(torch.equal, held[2], (rounded[0], values)))


def test_layers_with_a_window_are_refused():
    assert "window" in refusal(lambda: rounded_caches.make(MistralConfig(num_hidden_layers=1, sliding_window=8), 8, 8))
