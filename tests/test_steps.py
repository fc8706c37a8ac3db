"""Decode steps of row-invariant mode: what is looked up beforehand, and how far attention is filled up."""

import functools
import itertools
import random

import pytest
import torch
from refusing import refusal
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvbook.exact import NotInvariant, attention, attention_kernel, row_invariant


@pytest.fixture
def trials_anew(monkeypatch):
    monkeypatch.setattr(attention_kernel, "_verdicts", {})
    attention._step.cache_clear()
    yield
    attention._step.cache_clear()


class Watching(TorchDispatchMode):
    """Keep what is made of what goes through the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen.append(function(*arguments, **(options or {})))
        return self.seen[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
def test_a_layers_one_row_has_the_bits_that_it_has_through_the_dispatcher(dtype, biased):
    layer = torch.nn.Linear(96, 64, biased, dtype=dtype)
    x = torch.randn(1, 5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode(), row_invariant():
        whole = layer(x)
        for found in (layer(x[:, :1]), layer(x[:, :1]), torch.nn.functional.linear(x[:, :1], layer.weight, layer.bias)):
            assert torch.equal(found, whole[:, :1])
        assert torch.equal(layer(x[0, 0]), whole[0, 0])
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            layer(torch.randn(2, 48).to(dtype))


FUNCTIONS = {
    "square": lambda x: x.pow(2), "cube": lambda x: x.pow(3), "power": lambda x: x.abs().pow(0.3),
    "inverse root": lambda x: torch.rsqrt(x.abs()),
    "SiLU": torch.nn.SiLU(), "SiLU in place": lambda x: torch.nn.functional.silu(x.clone(), True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_bits_that_it_has_through_the_dispatcher(name, dtype):
    """Watched by a dispatch mode, it goes through it."""
    x = torch.randn(3, 77, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.inference_mode(), row_invariant():
        found = FUNCTIONS[name](x)
        with Watching() as watched:
            expected = FUNCTIONS[name](x)
        alone = FUNCTIONS[name](x[1:2, 5:])
    assert watched.seen
    assert torch.equal(found, expected)
    assert torch.equal(found[1:2, 5:], alone)


def test_under_vmap_a_step_gives_what_it_gives_row_by_row():
    layer, x = torch.nn.Linear(64, 32), torch.randn(4, 64, generator=torch.Generator().manual_seed(3))

    def step(row):
        return torch.nn.functional.silu(layer(torch.rsqrt(row.pow(2) + 1)))

    with torch.no_grad(), row_invariant():
        assert torch.allclose(torch.vmap(step)(x), torch.stack([step(row) for row in x]), rtol=1e-5)


CALLS = {
    # By their names, for in a block other functions stand there.
    "rsqrt": lambda x: torch.rsqrt(x),
    "pow": lambda x: x.pow(2),
    "linear": torch.nn.Linear(64, 32).requires_grad_(False),
    "scaled_dot_product_attention":
        lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 2, 1, 32)] * 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_step_calls_negates_what_is_kept_as_its_negative_and_is_seen_by_a_mode_that_watches_functions(name):
    class Seeing(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*arguments, **(options or {}))

    seen, x = [], -torch.rand(1, 64, generator=torch.Generator().manual_seed(4))
    negative = torch._neg_view(x)
    assert negative.is_neg()
    with torch.inference_mode(), row_invariant():
        assert torch.equal(CALLS[name](-x), CALLS[name](negative))
        with Seeing():
            CALLS[name](x)
    assert name in seen


def test_arguments_may_have_their_names():
    x, q = torch.rand(1, 64), torch.randn(1, 2, 1, 16)
    with torch.inference_mode(), row_invariant():
        assert torch.equal(torch.rsqrt(input=x), torch.rsqrt(x))
        assert torch.equal(x.pow(exponent=2), x.pow(2))
        attend = torch.nn.functional.scaled_dot_product_attention
        assert torch.equal(attend(query=q, key=q, value=q), attend(q, q, q))


def test_a_step_that_wants_a_gradient_is_refused_and_functions_are_left_to_torch():
    layer, q, x = torch.nn.Linear(16, 16), torch.randn(1, 2, 1, 16, requires_grad=True), torch.randn(1, 16)
    with row_invariant():
        with torch.no_grad():
            layer(x)
        with pytest.raises(NotInvariant, match="no backward pass"):
            layer(x)
        with pytest.raises(NotInvariant, match="no backward pass"):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert torch.rsqrt(q).requires_grad
        assert q.pow(2).requires_grad


def test_autocast_has_its_say_in_a_step_too():
    layer, x = torch.nn.Linear(64, 32), torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
    q = torch.randn(1, 2, 1, 16)
    with torch.inference_mode(), row_invariant():
        alone = layer(x[:, :1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole, step = layer(x), layer(x[:, :1])
            assert torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16
        with Watching() as watched:
            assert torch.equal(layer(x[:, :1]), alone)
    assert step.dtype == torch.bfloat16
    assert torch.equal(step, whole[:, :1])
    assert watched.seen


@pytest.mark.parametrize("part", ["products", "attention", "functions"])
def test_with_a_part_off_its_steps_are_stock(part):
    before = torch.nn.Linear.forward, torch.nn.functional.scaled_dot_product_attention, torch.rsqrt
    with row_invariant([part]):
        after = torch.nn.Linear.forward, torch.nn.functional.scaled_dot_product_attention, torch.rsqrt
    assert "no part 'norms': choose from products" in refusal(row_invariant([part, "norms"]).__enter__)
    changed = [one is not other for one, other in zip(before, after, strict=True)]
    assert changed == [part == name for name in ("products", "attention", "functions")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_steps_attention_has_the_bits_that_its_query_has_among_six(dtype, trials_anew):
    """Of shapes drawn at random."""
    attend, draw, attended = torch.nn.functional.scaled_dot_product_attention, random.Random(3), 0
    for seed in range(24):
        width, heads, groups = draw.choice((16, 64, 80)), draw.choice((1, 3, 6)), draw.choice((1, 2, 3, 4))
        keys = draw.choice((draw.randint(6, 70), draw.randint(6, 1500)))
        generator, shapes = torch.Generator().manual_seed(seed), ((heads * groups, 6), (heads, keys), (heads, keys))
        q, k, v = (torch.randn(1, n, m, width, generator=generator).to(dtype) for n, m in shapes)
        with torch.inference_mode(), row_invariant():
            six = attend(q, k, v, attn_mask=torch.ones(6, keys).tril(keys - 6).bool(), enable_gqa=True)
            for i in (0, 3, 5):
                asked, held = q[:, :, [i]], (x[:, :, : keys - 5 + i] for x in (k, v))
                assert torch.equal(attend(asked, *held, enable_gqa=True), six[:, :, [i]]), (width, heads, groups, keys)
            step = attention._step(dtype, q.device, torch.get_num_threads(), asked.shape, k.shape, v.shape, True)
            attended += step is not None
    assert attended > 12


def in_turn(left, right):
    """Add up one product after the other, in the same order on every processor and for any number of rows."""
    products = left[..., None] * right[..., None, :, :]
    return functools.reduce(torch.add, products.unbind(-2), torch.zeros(()))


def in_two_sums(query, key, value, bias, scale, cut=0):
    """Attend so that values are added up in turn, in two parts that meet at a key."""
    scores = in_turn(query.float(), key.float().transpose(2, 3)) * scale + bias.float()
    weights, values = (scores - scores.amax(-1, keepdim=True)).exp(), value.float()
    weights = weights / in_turn(weights, torch.ones(weights.shape[-1], 1))
    first = in_turn(weights[..., :cut], values[:, :, :cut])
    return (first + in_turn(weights[..., cut:], values[:, :, cut:])).to(query.dtype)


OTHERWISE = {
    "for a single query, far from its first keys": lambda heads, queries, keys: 64 if queries == 1 else 0,
    "for three queries": lambda heads, queries, keys: 64 if queries == 3 else 0,
    "in a last block of 32": lambda heads, queries, keys: 16 if keys % 512 == 32 else 0,
    "for several heads": lambda heads, queries, keys: keys // 2 if heads > 1 else 0,
}


@pytest.mark.parametrize("width", [16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", OTHERWISE)
def test_control_a_kernel_that_adds_up_keys_in_another_order_is_not_used(where, dtype, width, monkeypatch, trials_anew):
    def cut(query, key):
        return OTHERWISE[where](query.shape[1], query.shape[2], key.shape[2])

    monkeypatch.setattr(attention_kernel, "kernel", lambda q, k, *more: in_two_sums(q, k, *more, cut(q, k)))
    like = torch.empty(0, width, dtype=dtype)
    for queries, length in itertools.product((1, 3, 4), (32, 128)):
        at = OTHERWISE[where](2, queries, length)
        # Where no keys come after it, a cut changes nothing.
        expected = at == 0 or at >= length
        assert attention_kernel.allows(like, 2, queries, length, dtype) is expected, (queries, length)


@pytest.mark.parametrize("error", [0, 1e-6])
def test_a_kernel_that_blocks_behind_the_last_key_change_is_not_trusted(error, monkeypatch):
    def divides_in_another_place(query, key, value, bias, scale):
        # As torch's for wide heads on a GPU: a block after a query's last key moves where a result is rounded.
        out = in_two_sums(query, key, value, bias, scale)
        last = bias[:, :, :, -attention_kernel.BLOCK :].isfinite().any(-1)[..., None]
        return torch.where(last, out, out * (1 + error))

    monkeypatch.setattr(attention_kernel, "kernel", divides_in_another_place)
    assert attention_kernel._blocks_behind_change_nothing(torch.empty(0, 64)) is (error == 0)


@pytest.mark.parametrize(("refused", "length"), [(None, 1312), (288, 1408)])
def test_a_last_block_is_tried_by_itself_too(refused, length, monkeypatch):
    monkeypatch.setattr(attention_kernel, "allows", lambda like, heads, queries, keys, dtype: keys != refused)
    parts = attention_kernel.PARTS_OF_A_STEP
    assert attention_kernel.length_allowed(torch.empty(0, 64), 3, 4, 1293, torch.float32, parts) == length
