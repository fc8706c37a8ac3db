"""Safe reuse of a cache, on models made on the spot."""

import copy

import pytest
import torch
from transformers import DynamicCache, MistralConfig

from kvbook.errors import UserError
from kvbook.measuring import caches

KINDS = pytest.mark.parametrize("kind", ["dynamic", "static"])


def filled(model, ids, kind, room=96):
    cache = caches.make(kind, model.config, room)
    with torch.inference_mode():
        return model(torch.tensor([ids]), past_key_values=cache, use_cache=True).past_key_values


def written(model, ids, cache=None, n=8):
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=n, min_new_tokens=n,
            past_key_values=cache, return_dict_in_generate=True, disable_compile=True,
        )
    return output.sequences[0, len(ids) :].tolist(), caches.length(output.past_key_values)


@pytest.fixture
def prompt(ids):
    return ids[0, :12].tolist()


@pytest.fixture
def other(ids):
    """The same beginning, another id at place 8, and more after it: what a seam makes of a longer text."""
    row = ids[0].tolist()
    return [*row[:8], row[20], *row[12:20]]


@pytest.mark.parametrize(
    ("one", "other", "shared"), [([1, 2, 3], [1, 2, 4, 5], 2), ([1, 2], [1, 2, 3], 2), ([], [1], 0), ([2], [1], 0)]
)
def test_the_shared_length_is_that_of_the_longest_common_prefix(one, other, shared):
    assert caches.shared_length(one, other) == shared


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
    # Another prompt, a part of the same one, and one with nothing in common.
    for wanted in (other, prompt[:5], [prompt[0] + 1, *other[1:]]):
        assert written(model, wanted, caches.reusable(cache, prompt, wanted)) == written(model, wanted)
    # Control: the cache as it is holds the tokens of another prompt from place 8 on.
    assert written(model, other, copy.deepcopy(cache))[0] != written(model, other)[0]


@KINDS
def test_a_cache_as_long_as_the_prompt_is_fed_twice_and_the_helper_guards_against_it(llama, prompt, kind):
    expected, length = written(llama, prompt)
    cache = filled(llama, prompt, kind)
    reused = caches.reusable(cache, prompt, prompt)
    assert caches.length(reused) == len(prompt) - 1
    assert written(llama, prompt, reused) == (expected, length)
    # Control: transformers 5.23 says nothing and feeds the whole prompt on top of itself.
    tokens, twice = written(llama, prompt, copy.deepcopy(cache))
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
        with pytest.raises(UserError, match=message):
            caches.reusable(held, ids, wanted)
    with pytest.raises(UserError, match="'offloaded'"):
        caches.make("offloaded", llama.config, 4)
