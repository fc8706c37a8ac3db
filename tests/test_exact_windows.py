"""Queries that see keys of their own: sliding windows, sinks, chosen keys, heads of unequal widths."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, GptOssConfig, MistralConfig, StaticCache

from kvbook.exact import attention, own_keys, row_invariant, rows, verify, visible

SMALL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "sliding_window": 16, "head_dim": 16,
}
CONFIGS = {
    "mistral": MistralConfig(**SMALL),
    "gemma2": Gemma2Config(**SMALL, attn_logit_softcapping=5.0),
    "gpt_oss": GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}
CASES = pytest.mark.parametrize(
    ("family", "implementation"), [("mistral", "sdpa"), ("mistral", "eager"), ("gemma2", "eager"), ("gpt_oss", "eager")]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
LENGTH = 45


def model_of(family, implementation, dtype):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation=implementation)
    for name, weight in model.named_parameters():
        if "sinks" in name:
            weight.data.normal_()
    return model.to(dtype).eval()


def text(length=LENGTH, seed=4):
    return torch.randint(3, 320, (1, length), generator=torch.Generator().manual_seed(seed))


@DTYPES
@CASES
def test_a_text_of_nearly_three_windows_has_equal_bits_however_it_is_fed(family, implementation, dtype):
    found = verify(model_of(family, implementation, dtype), text())
    assert len(found) == 7
    assert [each for each in found if each.equal_rows != each.rows] == []


@CASES
def test_left_padding_and_a_batch_change_no_bit_beyond_the_window(family, implementation):
    model, ids, n = model_of(family, implementation, torch.bfloat16), text(), 5
    batch = torch.cat([text(LENGTH + n, 6), torch.cat([torch.zeros(1, n, dtype=torch.long), ids], 1)])
    mask = torch.ones_like(batch)
    mask[1, :n] = 0
    with torch.inference_mode(), row_invariant():
        alone = model(ids).logits[0]
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        assert torch.equal(model(batch, attention_mask=mask, position_ids=places).logits[1, n:], alone)
        # With a cache: a prefill of all but four tokens, a chunk of three, and a step.
        cache, parts = DynamicCache(config=model.config), []
        for start, stop in itertools.pairwise((0, LENGTH + n - 4, LENGTH + n - 1, LENGTH + n)):
            given = {"attention_mask": mask[:, :stop], "position_ids": places[:, start:stop], "past_key_values": cache}
            parts.append(model(batch[:, start:stop], **given).logits[1])
        assert torch.equal(torch.cat(parts)[n:], alone)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_control_blocks_that_begin_with_the_first_key_of_all_are_seen(family, monkeypatch):
    """As they would if a window were taken for a mask that hides keys and nothing more."""
    for module in (visible, attention):
        monkeypatch.setattr(module, "run", lambda seen: (0, seen.shape[-1]))
    model = model_of(family, "eager", torch.float32)
    assert any(each.equal_rows != each.rows for each in verify(model, text(200)))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_static_cache_longer_than_the_text_has_the_bits_of_a_dynamic_one(implementation):
    model, ids = model_of("mistral", implementation, torch.bfloat16), text(60)
    with torch.inference_mode(), row_invariant():
        full = model(ids, use_cache=False).logits
        for spare, sizes in itertools.product((0, 1, 100), ([7, 9, 1, 1, 30, 12], [17, *[1] * 43])):
            cache = StaticCache(config=model.config, max_cache_len=60 + spare)
            parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
            assert torch.equal(torch.cat(parts, 1), full), (spare, sizes)


def _random(heads, key_heads, queries, keys, width, dtype=torch.float32, value_width=None):
    generator = torch.Generator().manual_seed(keys)
    shapes = ((heads, queries, width), (key_heads, keys, width), (key_heads, keys, value_width or width))
    return [torch.randn(1, *shape, generator=generator).to(dtype) for shape in shapes]


def as_stock(found, stock):
    return torch.allclose(found.float(), stock.float(), atol=1e-5 if found.dtype == torch.float32 else 2e-2)


@DTYPES
@pytest.mark.parametrize("key_heads", [6, 2, 1])
def test_a_query_that_sees_chosen_keys_has_the_bits_of_a_step_on_those_keys_alone(dtype, key_heads):
    q, k, v = _random(6, key_heads, 11, 700, 32, dtype)
    mask = torch.rand(11, 700, generator=torch.Generator().manual_seed(1)) < 0.9
    mask[3] = True
    mask[4:8] = torch.arange(700) < 600
    with torch.inference_mode(), row_invariant():
        together = attend(q, k, v, attn_mask=mask, enable_gqa=True)
        for i in range(11):
            alone = attend(q[:, :, [i]], k[:, :, mask[i]], v[:, :, mask[i]], enable_gqa=True)
            assert torch.equal(together[:, :, [i]], alone), i
    assert as_stock(together, attend(q, k, v, attn_mask=mask, enable_gqa=True))


def test_heads_that_see_keys_of_their_own_are_attended_to_one_by_one():
    q, k, v = _random(4, 2, 9, 60, 16)
    mask = torch.rand(1, 4, 9, 60, generator=torch.Generator().manual_seed(1)) < 0.5
    with torch.inference_mode(), row_invariant():
        together = attend(q, k, v, attn_mask=mask, enable_gqa=True)
        for head, i in itertools.product(range(4), range(9)):
            some = [x[:, [head // 2]][:, :, mask[0, head, i]] for x in (k, v)]
            assert torch.equal(together[:, [head]][:, :, [i]], attend(q[:, [head]][:, :, [i]], *some))


@DTYPES
def test_values_of_another_width_than_the_keys_keep_a_querys_bits(dtype):
    q, k, v = _random(4, 4, 30, 30, 24, dtype, value_width=16)
    with torch.inference_mode(), row_invariant():
        whole = attend(q, k, v, is_causal=True)
        for i in range(30):
            assert torch.equal(attend(q[:, :, [i]], k[:, :, : i + 1], v[:, :, : i + 1]), whole[:, :, [i]])
    assert as_stock(whole, attend(q, k, v, is_causal=True))


@pytest.mark.parametrize("heads", [4, 10])
def test_a_bias_beside_the_window_is_kept(heads):
    q, k, v = _random(heads, 2, 9, 40, 16)
    window = (torch.arange(40) > torch.arange(9)[:, None] + 5) & (torch.arange(40) <= torch.arange(9)[:, None] + 31)
    bias = torch.randn(1, heads, 9, 40, generator=torch.Generator().manual_seed(2)).masked_fill(~window, -torch.inf)
    with torch.inference_mode(), row_invariant():
        found = attend(q, k, v, attn_mask=bias, enable_gqa=True)
    assert as_stock(found, attend(q, k, v, attn_mask=bias, enable_gqa=True))


CAUSAL = torch.ones(20, 20).tril().bool()
WINDOW = CAUSAL & torch.ones(20, 20).triu(-3).bool()


def without(keys):
    return CAUSAL.index_fill(1, torch.arange(20)[keys], False)


@pytest.mark.parametrize(
    ("seen", "run"),
    [
        (CAUSAL, (0, 20)), (CAUSAL[-1:], (0, 20)), (without(slice(0, 5)), (5, 20)), (WINDOW, None),
        (torch.cat([CAUSAL, torch.ones(20, 1).bool()], 1), None), (without(slice(3, 7))[7:], None),
        (without(slice(3, 7))[-1:], None), (CAUSAL[:0], (0, 1)), (torch.zeros(1, 4).bool(), (0, 1)),
    ],
    ids=["causal", "its last query", "padded", "window", "sink", "hole", "hole, one query", "no query", "sees nothing"],
)
def test_which_keys_one_alignment_serves(seen, run):
    assert visible.run(seen) == run


def test_a_windows_first_queries_go_together_and_the_others_alone():
    together, alone = own_keys.stretches(WINDOW)
    assert together == [([0, 1, 2, 3], (0, 4))]
    assert [queries for queries, _ in alone] == [list(range(4, 12)), list(range(12, 20))]
    assert alone[0][1].tolist() == [[i - 3, i - 2, i - 1, i] for i in range(4, 12)]


def test_queries_a_block_apart_are_multiplied_together():
    window = torch.ones(300, 300).tril().bool() & torch.ones(300, 300).triu(-3).bool()
    groups = visible.alike(window, rows.BLOCK)
    assert len(groups) == rows.BLOCK
    assert sorted(query for queries, _ in groups for query in queries.tolist()) == list(range(300))


def test_a_logarithm_of_summed_exponentials_is_its_querys_own_and_control_stock_is_not():
    scores = torch.randn(1, 2, 300, 300, generator=torch.Generator().manual_seed(3))
    window = torch.ones(300, 300).tril().bool() & torch.ones(300, 300).triu(-140).bool()
    masked = scores.masked_fill(~window, torch.finfo(torch.float32).min)

    def alone():
        return torch.cat([torch.logsumexp(scores[:, :, [i]][..., window[i]], -1) for i in range(300)], -1)

    with torch.inference_mode():
        stock, stock_alone = torch.logsumexp(masked, -1), alone()
        with row_invariant():
            found = torch.logsumexp(masked, -1)
            assert torch.equal(found, alone())
            assert torch.logsumexp(masked, -1, keepdim=True).shape == (1, 2, 300, 1)
        assert torch.allclose(found, stock, atol=1e-5)
        assert not torch.equal(stock, stock_alone), "control"


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 6, 6).bool(), torch.full((1, 1, 6, 6), float("-inf"))])
def test_a_query_that_sees_nothing_gives_numbers(mask):
    q, k, v = _random(2, 2, 6, 6, 24, value_width=16)
    with torch.inference_mode(), row_invariant():
        assert attend(q, k, v, attn_mask=mask).isfinite().all()
