"""Experts, convolutions, recurrent states, windows: a token's bits are its own, whoever comes with it."""

import itertools

import pytest
import torch
from small_models import LLAMAS, SMALL
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import MixtralConfig, MixtralForCausalLM

from kvbook.exact import convolutions, kernels, pointwise, row_invariant, rows, switch, verify

pytestmark = pytest.mark.usefixtures("no_gradients")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def mixtral(dtype, experts):
    sizes = SMALL | LLAMAS | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(3)
    return MixtralForCausalLM._from_config(config, experts_implementation=experts).to(dtype).eval()


def normal(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TEXT = torch.randint(3, 320, (1, 30), generator=torch.Generator().manual_seed(4))


@DTYPES
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_each_way_to_compute_experts_gives_a_token_its_bits(experts, dtype):
    assert [each for each in verify(mixtral(dtype, experts), TEXT[:, :17]) if each.equal_rows != each.rows] == []


def single_rows_that_differ(shape, dtype):
    """Count the rows of one expert whose bits are others alone than among forty, of sums that are zero."""
    experts, inner, columns = shape
    weights = torch.zeros(experts, columns, inner, dtype=dtype).transpose(1, 2)
    x, matrix, _ = next(rows._tellings(40, weights[1], None))
    weights[1] = matrix
    behind = torch.arange(experts) >= 1
    with row_invariant():
        together = torch.nn.functional.grouped_mm(x, weights, offs=(40 * behind).int())
        alone = [torch.nn.functional.grouped_mm(row, weights, offs=behind.int()) for row in x.split(1)]
    assert together.any()
    return sum(not torch.equal(one, row) for one, row in zip(alone, together.split(1), strict=True))


# As wide as an expert, as narrow as a router, and matrices of which not all begin at the beginning of a line.
SHAPES = [(8, 512, 896), (8, 512, 8), (5, 70, 33)]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_one_token_of_an_expert_has_the_bits_that_it_has_among_many(shape, dtype):
    assert single_rows_that_differ(shape, dtype) == 0


def test_control_a_single_row_that_is_multiplied_otherwise_is_seen(monkeypatch):
    def otherwise(x, weight):
        return (x.double() @ weight.double()).to(x.dtype)

    monkeypatch.setattr(rows, "for_one_of", lambda weights: otherwise)
    assert single_rows_that_differ(SHAPES[0], torch.bfloat16) > 0


def test_control_experts_products_left_to_the_library_are_seen(monkeypatch):
    honest = rows.product
    monkeypatch.setattr(rows, "product", lambda x, w, b=None: honest(x, w, b) * (1 + 1e-6 * len(x) * (len(w) == 96)))
    assert any(each.equal_rows != each.rows for each in verify(mixtral(torch.float32, "grouped_mm"), TEXT))


def test_grouped_products_are_right_also_of_no_token_and_of_rows_of_no_expert():
    weights, offs, x = torch.randn(3, 16, 32), torch.tensor([0, 2, 2], dtype=torch.int32), torch.randn(4, 16)
    with row_invariant():
        assert torch.nn.functional.grouped_mm(torch.randn(0, 16), weights, offs=offs * 0).shape == (0, 32)
        found = torch.nn.functional.grouped_mm(x, weights, offs=offs)
    assert torch.allclose(found[:2], x[:2] @ weights[1], atol=1e-5)
    assert not found[2:].any()


def convolved_alike(layer, x) -> bool:
    """Tell whether each position has the bits that it has without others, and roughly torch's own value."""
    stock = layer(x)
    with row_invariant():
        whole, alone = layer(x), [layer(x[:1, :, i : i + 4]) for i in range(x.shape[2] - 3)]
    assert torch.allclose(whole.float(), stock.float(), atol=1e-5 if x.dtype == torch.float32 else 2e-2)
    return torch.equal(torch.cat(alone, 2), whole[:1])


@DTYPES
@pytest.mark.parametrize("groups", [1, 4, 12])
@pytest.mark.parametrize("biased", [True, False])
def test_a_position_of_a_convolution_has_equal_bits_however_many_come_with_it(groups, biased, dtype):
    layer = torch.nn.Conv1d(12, 12, 4, groups=groups, bias=biased, dtype=dtype)
    assert convolved_alike(layer, normal(2, 12, 37).to(dtype))


def test_padding_and_dilation_of_a_convolution_are_torchs():
    layer, x = torch.nn.Conv1d(6, 6, 3, groups=6, padding=2, dilation=3), torch.randn(1, 6, 20)
    stock = layer(x)
    with row_invariant():
        assert torch.allclose(layer(x), stock, atol=1e-5)


def test_control_a_convolution_whose_taps_are_added_in_another_order_for_one_position_is_seen(monkeypatch):
    def shuffled(x, weight, *more):
        # As a library that has another kernel for a single position.
        return honest(x.flip(2), weight.flip(2), *more) if x.shape[2] == 4 else honest(x, weight, *more)

    honest = convolutions.convolution
    monkeypatch.setitem(switch._OURS["products"], "aten::convolution", shuffled)
    switch._replacements.cache_clear()
    try:
        assert not convolved_alike(torch.nn.Conv1d(12, 12, 4, groups=12), normal(1, 12, 37))
    finally:
        switch._replacements.cache_clear()


@pytest.mark.parametrize("order", [1, 2])
def test_a_rows_norm_does_not_depend_on_how_rows_lie_and_control_stock_does(order):
    x = normal(40, 577)
    scattered = x.t().contiguous().t()
    stock = [torch.linalg.vector_norm(each, order, dim=-1) for each in (x, scattered)]
    with row_invariant():
        found = [torch.linalg.vector_norm(each, order, dim=-1) for each in (x, scattered)]
        assert torch.equal(*found)
        assert all(torch.equal(torch.linalg.vector_norm(x[i], order, dim=-1), found[0][i]) for i in range(40))
    assert torch.allclose(found[0], stock[0], rtol=1e-5)
    if order == 2:
        assert not torch.equal(*stock), "control"


def test_a_sum_behind_a_convolution_has_equal_bits_for_one_position_and_for_many():
    layer, x = torch.nn.Conv1d(577, 577, 4, groups=577), normal(1, 577, 20)

    def summed(part):
        return torch.nn.functional.silu(layer(part)).transpose(1, 2).mean(-1)

    with row_invariant():
        assert torch.equal(torch.cat([summed(x[:, :, i : i + 4]) for i in range(17)], 1), summed(x))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("count", [8, 64, 65, 300])
def test_among_equals_the_first_are_chosen_however_many_come_with_or_after_them_and_control_stocks_not(count, largest):
    x = torch.randint(0, 4, (40, count), generator=torch.Generator().manual_seed(5)).bfloat16()
    longer = torch.nn.functional.pad(x, (0, 77), value=-9.0 if largest else 9.0)
    expected = x.sort(dim=-1, descending=largest, stable=True)
    stock = [torch.topk(each, 8, largest=largest).indices for each in (x, longer)]
    with row_invariant():
        found, behind = (torch.topk(each, 8, largest=largest) for each in (x, longer))
        alone = torch.cat([torch.topk(row, 8, largest=largest).indices for row in x.split(1)])
        assert torch.topk(x.t(), 8, dim=0, largest=largest).indices.t().equal(found.indices)
        assert torch.topk(x, count, dim=1).values.shape == x.shape
    assert torch.equal(found.values, expected.values[:, :8])
    assert all(torch.equal(each, expected.indices[:, :8]) for each in (found.indices, behind.indices, alone))
    if count == 300:
        assert not torch.equal(*stock), "control"


@pytest.fixture(params=["torch's softmax", "blocks of our own"])
def way(request, monkeypatch):
    """Take either way to a softmax: what torch's is trusted for, and what is done where it is not."""
    if request.param == "blocks of our own":
        monkeypatch.setattr(pointwise, "_stock_holds", lambda *_: False)


@pytest.mark.parametrize("keys", [1, 16, 127, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rows_probabilities_are_those_that_it_has_alone_and_with_masked_keys_behind(keys, dtype, way):
    scores = normal(1, 3, 5, keys, seed=8).to(dtype)
    longer = torch.nn.functional.pad(scores, (0, 1300 - keys), value=torch.finfo(dtype).min)
    with row_invariant():
        found = scores.softmax(-1)
        assert torch.equal(longer.softmax(-1)[..., :keys], found)
        assert torch.equal(scores[:, 1:2, 2:3].softmax(-1), found[:, 1:2, 2:3])
        assert torch.equal(scores.transpose(1, 3).softmax(1).transpose(1, 3), found)
    assert torch.allclose(found, scores.softmax(-1), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_query_that_sees_nothing_is_given_numbers_and_changes_no_other(way):
    scores = normal(2, 4, 5, 9, seed=3)
    # Padding on the left, then a window.
    for hidden in (torch.arange(9) < 3, torch.arange(9) % 2 == 0):
        masked = scores.masked_fill(hidden, -torch.inf)
        nothing = masked.clone()
        nothing[:, :, 0] = -torch.inf
        assert nothing.softmax(-1)[:, :, 0].isnan().all(), "or there would be nothing to mend"
        with row_invariant():
            found, expected = nothing.softmax(-1), masked.softmax(-1)
        assert found.isfinite().all()
        assert torch.equal(found[:, :, 1:], expected[:, :, 1:])


OTHERWISE = {
    "not at all": lambda x: 0, "for many rows": lambda x: len(x) > 64, "for many keys": lambda x: x.shape[-1] > 1000
}


@pytest.mark.parametrize("where", OTHERWISE)
def test_control_a_softmax_of_torch_that_sums_otherwise_somewhere_is_not_trusted(where, monkeypatch):
    honest = kernels.base("aten::_softmax", "CPU")

    def softmax(x, *more):
        return honest(x, *more) * (1 + 2**-22 * OTHERWISE[where](x))

    monkeypatch.setattr(pointwise, "base", lambda *_: softmax)
    assert pointwise._stock_holds.__wrapped__(torch.float32, torch.get_num_threads()) is (where == "not at all")


# Attention of queries that see keys of their own: windows, chosen keys, heads of unequal widths.

def _random(heads, key_heads, queries, keys, width, dtype=torch.float32, value_width=None):
    shapes = ((heads, queries, width), (key_heads, keys, width), (key_heads, keys, value_width or width))
    return [normal(1, *shape, seed=keys + place).to(dtype) for place, shape in enumerate(shapes)]


def as_stock(found, stock):
    return torch.allclose(found.float(), stock.float(), atol=1e-5 if found.dtype == torch.float32 else 2e-2)


# Keys are chosen for all heads, and for each.
@DTYPES
@pytest.mark.parametrize(("key_heads", "masks"), [(6, 1), (2, 1), (1, 1), (2, 6)])
def test_a_query_that_sees_chosen_keys_has_the_bits_of_a_step_on_those_keys_alone(dtype, key_heads, masks):
    q, k, v = _random(6, key_heads, 11, 700, 32, dtype)
    mask = torch.rand(masks, 11, 700, generator=torch.Generator().manual_seed(1)) < 0.9
    mask[:, 3] = True
    mask[:, 4:8] = torch.arange(700) < 600
    with row_invariant():
        together = attend(q, k, v, attn_mask=mask, enable_gqa=True)
        for head, i in itertools.product(range(6), range(11)):
            some = [x[:, [head * key_heads // 6]][:, :, mask[head % masks, i]] for x in (k, v)]
            assert torch.equal(together[:, [head]][:, :, [i]], attend(q[:, [head]][:, :, [i]], *some)), (head, i)
    assert as_stock(together, attend(q, k, v, attn_mask=mask, enable_gqa=True))


@DTYPES
def test_values_of_another_width_than_the_keys_keep_a_querys_bits(dtype):
    q, k, v = _random(4, 4, 30, 30, 24, dtype, value_width=16)
    with row_invariant():
        whole = attend(q, k, v, is_causal=True)
        for i in range(30):
            assert torch.equal(attend(q[:, :, [i]], k[:, :, : i + 1], v[:, :, : i + 1]), whole[:, :, [i]])
    assert as_stock(whole, attend(q, k, v, is_causal=True))


@pytest.mark.parametrize("heads", [4, 10])
def test_a_bias_beside_the_window_is_kept(heads):
    q, k, v = _random(heads, 2, 9, 40, 16)
    window = (torch.arange(40) > torch.arange(9)[:, None] + 5) & (torch.arange(40) <= torch.arange(9)[:, None] + 31)
    bias = torch.randn(1, heads, 9, 40, generator=torch.Generator().manual_seed(2)).masked_fill(~window, -torch.inf)
    with row_invariant():
        found = attend(q, k, v, attn_mask=bias, enable_gqa=True)
    assert as_stock(found, attend(q, k, v, attn_mask=bias, enable_gqa=True))


def test_a_logarithm_of_summed_exponentials_is_its_querys_own_and_control_stock_is_not():
    scores = torch.randn(1, 2, 300, 300, generator=torch.Generator().manual_seed(3))
    window = torch.ones(300, 300).tril().bool() & torch.ones(300, 300).triu(-140).bool()
    masked = scores.masked_fill(~window, torch.finfo(torch.float32).min)

    def alone():
        return torch.cat([torch.logsumexp(scores[:, :, [i]][..., window[i]], -1) for i in range(300)], -1)

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
    with row_invariant():
        assert attend(q, k, v, attn_mask=mask).isfinite().all()
