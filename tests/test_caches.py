"""Safe reuse of a cache, on models made on the spot."""

import copy

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, MistralConfig

from kvbook.errors import UserError
from kvbook.measuring import caches

KINDS = ("dynamic", "static")


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
    """The same beginning, another id at place 8, and more behind it: what a seam makes of a longer text."""
    row = ids[0].tolist()
    return [*row[:8], row[20], *row[12:20]]


def test_the_shared_length_is_that_of_the_longest_common_prefix():
    assert caches.shared_length([1, 2, 3], [1, 2, 4, 5]) == 2
    assert caches.shared_length([1, 2], [1, 2, 3]) == 2
    assert caches.shared_length([], [1]) == 0
    assert caches.shared_length([2], [1]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_reused_is_the_common_prefix_bit_for_bit(llama, prompt, other, kind):
    cache = filled(llama, prompt, kind)
    reused = caches.reusable(cache, prompt, other)
    assert caches.length(reused) == 8
    for old, new in zip(cache.layers, reused.layers, strict=True):
        assert torch.equal(old.keys[:, :, :8], new.keys[:, :, :8])
        assert torch.equal(old.values[:, :, :8], new.values[:, :, :8])
        if kind == "static":
            assert not new.keys[:, :, 8:].any()
            assert not new.values[:, :, 8:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_safe_reuse_writes_the_tokens_of_no_reuse_and_reuse_as_it_is_does_not(llama, prompt, other, kind):
    expected, length = written(llama, other)
    cache = filled(llama, prompt, kind)
    assert written(llama, other, caches.reusable(cache, prompt, other)) == (expected, length)
    # Control: the cache as it is holds the tokens of another prompt from place 8 on.
    assert written(llama, other, copy.deepcopy(cache))[0] != expected


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_shorter_than_the_cache_reuses_what_it_has(llama, prompt, kind):
    cache = filled(llama, prompt, kind)
    short = prompt[:5]
    assert written(llama, short, caches.reusable(cache, prompt, short)) == written(llama, short)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_that_is_reused_is_left_as_it_was(llama, prompt, other, kind):
    cache = filled(llama, prompt, kind)
    before = copy.deepcopy(cache)
    written(llama, other, caches.reusable(cache, prompt, other))
    assert caches.length(cache) == len(prompt)
    for old, new in zip(before.layers, cache.layers, strict=True):
        assert torch.equal(old.keys, new.keys)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_common_reuses_nothing(llama, prompt, other, kind):
    stranger = [prompt[0] + 1, *other[1:]]
    reused = caches.reusable(filled(llama, prompt, kind), prompt, stranger)
    assert caches.length(reused) == 0
    assert written(llama, stranger, reused) == written(llama, stranger)


def test_learned_positions_go_on_where_the_kept_prefix_ends(gpt2, prompt, other):
    cache = filled(gpt2, prompt, "dynamic")
    assert written(gpt2, other, caches.reusable(cache, prompt, other)) == written(gpt2, other)


def test_ids_that_are_not_the_caches_own_are_refused_in_one_line(llama, prompt, other):
    cache = filled(llama, prompt, "dynamic")
    for wrong, wanted, message in ((prompt[:-1], other, "holds 12 tokens"), (prompt, [], "empty prompt")):
        with pytest.raises(UserError, match=message) as error:
            caches.reusable(cache, wrong, wanted)
        assert "\n" not in str(error.value)


def test_a_cache_that_cannot_go_back_is_refused():
    config = MistralConfig(num_hidden_layers=1, sliding_window=4)
    cache = DynamicCache(config=config)
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    with pytest.raises(UserError, match="DynamicSlidingWindowLayer cannot be cut back"):
        caches.reusable(cache, [1, 2, 3], [1, 2, 4])
    # Control: a plain layer of the same content is cut.
    plain = DynamicCache()
    plain.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert caches.length(caches.reusable(plain, [1, 2, 3], [1, 2, 4])) == 2


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match="'offloaded'"):
        caches.make("offloaded", GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8)).config, 4)
