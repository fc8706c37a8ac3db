"""Attention of queries that see keys of their own: windows, chosen keys, heads of unequal widths."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from kvbook.exact import row_invariant

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


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
