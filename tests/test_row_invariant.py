"""The promise of `row_invariant`, tested by someone who knows nothing but that name.

Widths, heads and vocabulary are such that stock kernels take other paths for other numbers of rows: SmolLM2-135M's and
an odd one, where vectorised loops leave something over.
"""

import copy
import functools

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import LLAMAS, SMALL, generated
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from kvbook.exact import attention, row_invariant, verify, visible

LLAMA = SMALL | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9,
                 "max_position_embeddings": 1100, "initializer_range": 0.05}
FALCON = SMALL | {"hidden_size": 576, "num_hidden_layers": 2, "num_attention_heads": 9, "initializer_range": 0.05}
WINDOW = SMALL | LLAMAS | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "sliding_window": 16,
                           "head_dim": 16}
GPT2 = SMALL | {"n_layer": 2, "n_positions": 1100}
CONFIGS = {
    "gpt2": transformers.GPT2Config(**GPT2, n_embd=576, n_head=9, initializer_range=0.05),
    "smollm2": transformers.LlamaConfig(**LLAMA, num_key_value_heads=3, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**LLAMA, num_key_value_heads=3),
    "mpt": transformers.MptConfig(
        **SMALL, d_model=576, n_heads=9, n_layers=2, max_seq_len=1100, initializer_range=0.05
    ),
    "falcon": transformers.FalconConfig(**FALCON),
    "falcon, ALiBi": transformers.FalconConfig(**FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "odd widths": transformers.LlamaConfig(
        **LLAMA | {"hidden_size": 90, "intermediate_size": 151, "num_attention_heads": 5, "initializer_range": 0.2},
        num_key_value_heads=5, head_dim=18,
    ),
    "gpt2, odd widths": transformers.GPT2Config(**GPT2, n_embd=50, n_head=5, initializer_range=0.2),
    # Scores of three dimensions; windows that a text is nearly three times as long as; sinks.
    "xglm": transformers.XGLMConfig(
        **SMALL, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=1100, init_std=0.2
    ),
    "mistral": transformers.MistralConfig(**WINDOW),
    "gemma2": transformers.Gemma2Config(**WINDOW, attn_logit_softcapping=5.0),
    "gpt_oss": transformers.GptOssConfig(**WINDOW, num_local_experts=4, num_experts_per_tok=2),
}
# They have one attention of their own.
EAGER_ONLY = ("mpt", "xglm", "gemma2", "gpt_oss")
CASES = [(family, dtype, attention) for family in CONFIGS for dtype in ("float32", "bfloat16", "float16")
         for attention in (("eager",) if family in EAGER_ONLY else ("sdpa", "eager"))]
EACH_CASE = pytest.mark.parametrize(("family", "dtype", "attention"), CASES)
# transformers' Falcon cannot put ALiBi's bias on a static cache, with or without the switch.
NO_STATIC = ("falcon, ALiBi",)
TWO_KINDS_OF_LAYER = ("gemma2", "gpt_oss")
# So many single tokens go beyond a window, and beyond each number of keys that a vectorised loop leaves over.
LENGTH, SINGLE, CHUNKS = 41, 20, [17, 1, 4, 1, 1, 13, 4]


@functools.cache
def weights_of(family, dtype):
    torch.manual_seed(4)
    config = copy.deepcopy(CONFIGS[family])
    if dtype == "float16" or family not in TWO_KINDS_OF_LAYER:
        # A second layer of the same kind runs what the first one runs, and without products in fp16 takes seconds.
        config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        if "sinks" in name:
            weight.data.normal_()
    return model


def model_of(family, dtype, attention="sdpa"):
    model = weights_of(family, dtype)
    model.set_attn_implementation(attention)
    return model


def text(length, rows=1, seed=5):
    return torch.randint(3, 320, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch, pad, family):
    """Pad the last of several texts, and return the mask and, for models that take them, positions."""
    mask = torch.ones_like(batch)
    mask[-1, :pad] = 0
    # MPT takes no positions, it counts from the query.
    return mask, {} if family == "mpt" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def in_chunks(model, ids, sizes, cache):
    """Return logits, every hidden state, and the keys and values of the last layer, but for those of a window."""
    given = {"past_key_values": cache, "use_cache": True, "output_hidden_states": True}
    outputs = [model(part, **given) for part in ids.split(sizes, 1)]
    hidden = [torch.cat(states, 1) for states in zip(*(output.hidden_states for output in outputs), strict=True)]
    last = cache.layers[-1]
    held = [] if last.is_sliding else [x[:, :, : ids.shape[1]] for x in (last.keys, last.values)]
    return [torch.cat([output.logits for output in outputs], 1), *hidden, *held]


def all_equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@EACH_CASE
def test_however_the_tokens_are_fed_no_bit_differs(family, dtype, attention):
    model, ids = model_of(family, dtype, attention), text(LENGTH)
    with torch.inference_mode(), row_invariant():
        whole = in_chunks(model, ids, [LENGTH], DynamicCache(config=model.config))
        uncached = model(ids, use_cache=False, output_hidden_states=True)
        states = [uncached.logits, *uncached.hidden_states]
        assert all_equal(states, whole[: len(states)]), "no cache"
        # On a static cache a single token meets as many keys wherever it stands.
        room = StaticCache(config=model.config, max_cache_len=LENGTH + 7)
        caches = [DynamicCache(config=model.config), DynamicCache(config=model.config) if family in NO_STATIC else room]
        for sizes, cache in zip(([*[1] * SINGLE, LENGTH - SINGLE - 1, 1], CHUNKS), caches, strict=True):
            assert all_equal(in_chunks(model, ids, sizes, cache), whole), sizes


@EACH_CASE
def test_company_in_a_batch_and_left_padding_change_no_bit(family, dtype, attention):
    model, ids, pad = model_of(family, dtype, attention), text(LENGTH), 9
    batch = torch.cat([text(LENGTH + pad, seed=6), torch.cat([torch.full((1, pad), 2), ids], 1)])
    mask, place = left_padded(batch, pad, family)
    with torch.inference_mode(), row_invariant():
        alone = model(ids).logits[0]
        assert torch.equal(model(torch.cat([text(LENGTH, seed=6), ids])).logits[1], alone)
        assert torch.equal(model(batch, attention_mask=mask, **place).logits[1, pad:], alone)
        # The same with a cache: a prefill of the padded batch, then one step.
        before, last = ({name: x[:, part] for name, x in place.items()} for part in (slice(-1), slice(-1, None)))
        cache = model(batch[:, :-1], attention_mask=mask[:, :-1], use_cache=True, **before).past_key_values
        step = model(batch[:, -1:], attention_mask=mask, past_key_values=cache, **last)
        assert torch.equal(step.logits[1, -1], alone[-1])


# It feeds a prefill and single steps, which the tests above do in every dtype.
@pytest.mark.parametrize(("family", "attention"), [case[::2] for case in CASES if case[1] == "bfloat16"])
def test_what_generate_scores_is_what_a_full_pass_scores(family, attention):
    model, ids = model_of(family, "bfloat16", attention), text(11)
    with torch.inference_mode(), row_invariant():
        for kind in ["dynamic"] if family in NO_STATIC else ["dynamic", "static"]:
            output = generated(model, ids, 6, cache_implementation=kind, output_logits=True)
            scores = torch.stack(output.logits, 1)
            assert torch.equal(scores, model(output.sequences[:, :-1]).logits[:, 10:].to(scores.dtype))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_control_the_same_comparison_sees_one_row_that_comes_out_otherwise_than_several(family):
    # Made so: in which dtypes and at how many rows stock models drift is the processor's affair.
    model, ids = model_of(family, "float32", "eager" if family in EAGER_ONLY else "sdpa"), text(9)
    otherwise = model.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, output: output * (1 + 2.0**-16 * (output.shape[1] == 1))
    )
    with otherwise, torch.inference_mode(), row_invariant():
        whole = in_chunks(model, ids, [9], DynamicCache(config=model.config))
        single = in_chunks(model, ids, [2, *[1] * 7], DynamicCache(config=model.config))
    assert not all_equal(whole, single)
    assert torch.allclose(whole[0], single[0], atol=1e-3), "equal but for rounding: what belongs together is compared"


@pytest.mark.parametrize("family", ["xglm", "mistral", "gpt_oss"])
def test_control_blocks_of_keys_that_begin_with_the_first_key_of_all_are_seen(family, monkeypatch):
    """As they would if padding or a window were taken for a mask that hides keys and nothing more."""
    for module in (visible, attention):
        monkeypatch.setattr(module, "run", lambda seen: (0, seen.shape[-1]))
    model, ids, pad = model_of(family, "float32", "eager"), text(200), 7
    batch = torch.cat([text(pad), ids], 1)
    mask, place = left_padded(batch, pad, family)
    with torch.inference_mode(), row_invariant():
        assert not torch.equal(model(batch, attention_mask=mask, **place).logits[0, pad:], model(ids).logits[0])


@pytest.mark.parametrize("family", ["smollm2", "gpt2, odd widths"])
def test_it_holds_over_the_length_of_a_thousand_tokens(family):
    model, ids = model_of(family, "bfloat16"), text(1024)
    with torch.inference_mode(), row_invariant():
        cache = StaticCache(config=model.config, max_cache_len=1100)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([700, 1, 299, 1, 1, 22], 1)]
        assert torch.equal(torch.cat(parts, 1), model(ids).logits)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=st.sampled_from([c for c in CASES if c[0] not in NO_STATIC and c[1:] != ("float16", "sdpa")]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), spare=st.integers(0, 700), mates=st.integers(0, 3),
    pad=st.integers(0, 70), seed=st.integers(0, 1000),
)
def test_random_chunks_cache_lengths_batch_mates_and_padding_change_no_bit(case, sizes, spare, mates, pad, seed):
    # transformers' MPT fails, with or without the switch, on one token without a cache.
    sizes, pad = [sizes[0] + 1, *sizes[1:]], pad if mates else 0
    model, length = model_of(*case), sum(sizes)
    ids = text(length, seed=seed)
    batch = torch.cat([text(length + pad, mates, seed + 1), torch.cat([text(pad, seed=seed + 2), ids], 1)])
    mask, place = left_padded(batch, pad, case[0])
    with torch.inference_mode(), row_invariant():
        full, cache = model(ids).logits[0], StaticCache(config=model.config, max_cache_len=length + spare)
        parts = torch.cat([model(part, past_key_values=cache).logits[0] for part in ids.split(sizes, 1)])
        assert torch.equal(model(batch, attention_mask=mask, **place).logits[-1, pad:], full)
    assert torch.equal(parts, full)


@pytest.mark.parametrize("length", [3, 4, 5, 12])
def test_verify_begins_with_a_single_token_on_an_empty_cache_in_mpt_too(family_folders, length):
    model = AutoModelForCausalLM.from_pretrained(family_folders["mpt"]).eval()
    found = verify(model, torch.arange(40, 40 + length)[None], static=False)
    assert [each.way for each in found][2] == "token by token, dynamic cache"
    assert all((each.equal_rows, each.rows, each.largest) == (length, length, 0) for each in found)
