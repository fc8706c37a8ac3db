"""The switch as a switch: on, off, refusing, and its own controls."""

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from test_row_invariant import model_of, text
from test_steps import in_turn
from transformers import DynamicCache
from transformers.models.mpt.modeling_mpt import MptAttention

from kvbook import UserError
from kvbook.exact import NotInvariant, is_on, row_invariant, rows, steps, sums, switch, verify
from kvbook.exact.kernels import base

TOKENS = text(40)
SUMS = {"aten::mean.dim": sums.mean, "aten::sum.dim_IntList": sums.total}


@pytest.fixture(scope="module")
def wide():
    return model_of("smollm2", "float32")


@pytest.fixture
def stock_sums():
    for name in SUMS:
        base(name, "CPU")


def one_by_one(model, ids):
    cache = DynamicCache(config=model.config)
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(1, 1)], 1)


def what_a_block_replaces():
    functional = torch.nn.functional
    return [torch.nn.Linear.forward, functional.scaled_dot_product_attention, torch.Tensor.pow, torch.rsqrt,
            functional.silu, MptAttention.forward]


def test_everything_is_restored_on_leaving_also_by_an_exception(wide):
    image, kernel, stock = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2), what_a_block_replaces()
    with torch.inference_mode():
        before = wide(TOKENS).logits
        with row_invariant():
            assert is_on()
            assert not any(one is other for one, other in zip(what_a_block_replaces(), stock, strict=True))
            wide(TOKENS)
            with pytest.raises(NotInvariant, match="conv"):
                torch.nn.functional.conv2d(image, kernel)
        with pytest.raises(RuntimeError, match="ours"), row_invariant():
            raise RuntimeError("ours")
        assert torch.equal(wide(TOKENS).logits, before)
    assert not is_on()
    assert all(one is other for one, other in zip(what_a_block_replaces(), stock, strict=True))
    assert "pow" not in vars(torch.Tensor)
    torch.nn.functional.conv2d(image, kernel)


def test_blocks_nest_and_give_the_same_bits_each_time_in_every_thread(wide):
    with torch.inference_mode(), row_invariant(), ThreadPoolExecutor(1) as other:
        with row_invariant():
            inner = wide(TOKENS).logits
        assert is_on()
        outer = one_by_one(wide, TOKENS)
        there = other.submit(torch.inference_mode()(wide), TOKENS).result().logits
    with torch.inference_mode(), row_invariant():
        again = wide(TOKENS).logits
    assert all(torch.equal(inner, each) for each in (outer, again, there))


def test_it_works_under_no_grad_too_and_says_so_where_autograd_is_on(wide):
    with torch.no_grad(), row_invariant():
        assert torch.equal(wide(TOKENS).logits, one_by_one(wide, TOKENS))
    with row_invariant(), pytest.raises(NotInvariant, match="no_grad") as error:
        wide(TOKENS)
    assert isinstance(error.value, UserError)


@pytest.mark.parametrize(("operation", "name"), [
    (lambda x: torch.nn.functional.conv2d(x[None], torch.ones(1, 1, 2, 2)), "conv"),
    (lambda x: torch.nn.functional.conv1d(x[None], torch.ones(4, 4, 1), stride=2), "stride"),
    (lambda x: torch.mv(x, torch.ones(8)), "mv"),
    (lambda x: torch.addcmul(x, x, x, value=0.3), "addcmul"),
    (lambda x: torch.linalg.inv(x @ x.T), "linalg"),
    (lambda x: torch.mm(x, torch.ones(8, 2), out=torch.empty(4, 2)), r"mm\.out"),
    (lambda x: torch._int_mm(*[torch.ones(32, 32).to(torch.int8)] * 2), "int_mm"),
    (lambda x: torch.ops.mkldnn._linear_pointwise(x, torch.ones(8, 8), None, "none", [], ""), "mkldnn"),
    (lambda x: torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.1), "dropout"),
    (lambda x: torch.nn.functional.grouped_mm(*[torch.randn(4, 16, 16)] * 2, offs=None), "_grouped_mm"),
    (lambda x: torch.linalg.vector_norm(x, 3, dim=-1), "order 3"),
])
def test_what_it_cannot_make_invariant_is_refused_by_name(operation, name):
    with torch.inference_mode(), row_invariant(), pytest.raises(NotInvariant, match=name):
        operation(torch.randn(4, 8))


def test_what_a_library_brings_after_the_first_block_is_refused_too():
    with row_invariant():
        pass
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define("kvbook_late(Tensor x) -> Tensor")
        library.impl("kvbook_late", lambda x: x + 1, "CPU")
        assert torch.equal(torch.ops.torchvision.kvbook_late(torch.ones(1)), torch.full((1,), 2.0))
        with row_invariant(), pytest.raises(NotInvariant, match="kvbook_late"):
            torch.ops.torchvision.kvbook_late(torch.ones(1))


@pytest.mark.parametrize(("dtype", "exponent"), [
    *itertools.product((torch.float32, torch.bfloat16, torch.float16, torch.int64), (2, 2.0, 3, 0.5)),
    (torch.float32, 2 + 0j),
])
def test_a_power_has_the_dtype_of_torchs_own_and_a_square_its_bits(dtype, exponent):
    x = (torch.arange(-97, 97) / 7).to(dtype)
    expected = x.pow(exponent)
    with row_invariant():
        found = x.pow(exponent)
    assert found.dtype == expected.dtype
    exactly = {"rtol": 0, "atol": 0} if exponent == 2 else {}
    torch.testing.assert_close(found, expected, equal_nan=True, **exactly)


def replacements():
    return switch._of(switch.PARTS, "CPU", frozenset(torch._C._dispatch_get_all_op_names()))


def uneven(function):
    """Compute one row a little otherwise than several: what a library does, written so that it does so anywhere."""
    return lambda x, *more, **options: function(x, *more, **options) * (1 + 2.0**-12 * (x.shape[-2] == 1))


@pytest.mark.parametrize("changed", [
    "aten::linear", "aten::scaled_dot_product_attention", "aten::mm", "aten::silu", "aten::mean.dim",
])
def test_control_one_operation_that_changes_with_the_number_of_rows_is_caught(changed, monkeypatch, stock_sums):
    # So that loops leave something over.
    model, table = model_of("odd widths", "float32"), replacements() | SUMS
    if changed == "aten::mm":
        # What torch's own linear is made of, once it is left to itself.
        table = {name: function for name, function in table.items() if name not in ("aten::linear", "aten::matmul")}
    with torch.inference_mode():
        for function, exact in ((table[changed], True), (uneven(table[changed]), False)):
            monkeypatch.setattr(switch, "_of", lambda *_, found=table | {changed: function}: found)
            with row_invariant():
                assert torch.equal(model(TOKENS).logits, one_by_one(model, TOKENS)) is exact


@pytest.fixture
def product(monkeypatch, no_compiler):
    """Return a function that sets a library's product by a rule: how far it errs for rows of a matrix."""

    def err(rule):
        def multiplied(x, weight, bias):
            # Row by row, in the same order on every processor.
            out = torch.stack([(row[:, None] * weight).sum(0) for row in x])
            return (out if bias is None else out + bias) * (1 + 1e-6 * rule(x, weight))

        monkeypatch.setattr(rows, "_product", multiplied)
        monkeypatch.setattr(rows, "_known", {})
        for name in ("aten::mm", "aten::addmm"):
            base(name, "CPU")
        return multiplied

    return err


def test_a_row_count_is_used_only_if_its_bits_equal_the_tiles(product):
    product(lambda x, weight: len(x) not in (16, 64))
    weight = torch.randn(32, 24)
    counts = rows._row_counts(weight, None)
    assert [piece.size for piece in counts.plan(101, weight, None)] == [64, 16, 16, 16]
    assert [piece.size for piece in counts.plan(1, weight, None)] == [16]


def test_a_count_that_is_refused_is_tried_on_fewer_columns(product):
    # What a library with kernels of its own for wide matrices might do.
    multiplied = product(lambda x, weight: len(x) > 16 and weight.shape[1] > 256)
    weight, bias, x = torch.randn(8, 1024), torch.randn(1024), torch.randn(37, 8)
    pieces = rows._row_counts(weight, bias).plan(37, weight, bias)
    assert [(piece.start, piece.count, piece.size, piece.cuts) for piece in pieces] == [(0, 32, 32, 4), (32, 5, 8, 1)]
    assert torch.equal(rows.product(x, weight, bias)[:16], multiplied(x[:16], weight, bias))
    # Control: uncut, the wide product of so many rows has other bits.
    assert not torch.equal(multiplied(x, weight, bias)[:16], multiplied(x[:16], weight, bias))


def test_where_rows_of_a_tile_are_not_alike_every_row_goes_alone(product):
    product(lambda x, weight: torch.arange(len(x))[:, None])
    weight, x = torch.randn(32, 24), torch.randn(5, 32)
    out = rows.product(x, weight)
    assert all(torch.equal(out[i : i + 1], rows.product(x[i : i + 1], weight)) for i in range(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_comparison_of_kernels_sees_another_order_of_addition_in_16_bits_and_random_numbers_hide_it(dtype):
    def differing(x, weight):
        # Products of 16-bit numbers are exact in 32 bits.
        x, weight = x.float(), weight.float()
        halves = in_turn(x[:, :288], weight[:288]) + in_turn(x[:, 288:], weight[288:])
        return (halves.to(dtype) != in_turn(x, weight).to(dtype)).float().mean().item()

    assert differing(*next(rows._tellings(16, torch.empty(576, 192, dtype=dtype), None))[:2]) > 0.5
    assert differing(torch.randn(16, 576).to(dtype), torch.randn(576, 192).to(dtype)) < 0.05


@pytest.mark.parametrize("inner", [2, 16, 576])
def test_in_64_bits_products_are_compared_on_numbers_whose_products_are_rounded(inner):
    """Products of 32-bit numbers are exact in 64 bits: they do not show whether a product is rounded first."""
    for x, weight, _ in rows._tellings(16, torch.empty(inner, 48, dtype=torch.float64), None):
        assert all((each != each.float()).float().mean() > 0.9 for each in (x, weight))


# 4 to 7: so few terms that sums which are zero do not tell whether a product is rounded before it is added.
@pytest.mark.parametrize("inner", [1, 2, 3, 4, 5, 7, 8, 31, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_products_of_any_shape_give_a_row_its_bits(dtype, inner):
    generator = torch.Generator().manual_seed(inner)
    with torch.inference_mode(), row_invariant():
        for columns, biased in itertools.product((1, 4, 5, 8, 33), (False, True)):
            layer = torch.nn.Linear(inner, columns, biased, dtype=dtype)
            x = torch.randn(37, inner, generator=generator, dtype=torch.float64).to(dtype)
            whole = layer(x)
            for size in (1, 3):
                assert torch.equal(torch.cat([layer(part) for part in x.split(size)]), whole), (columns, biased, size)


def test_it_is_as_near_to_the_truth_as_stock(wide):
    with torch.inference_mode():
        exact = copy.deepcopy(wide).double()(TOKENS).logits
        stock = (wide(TOKENS).logits - exact).square().mean().sqrt()
        with row_invariant():
            ours = (wide(TOKENS).logits - exact).square().mean().sqrt()
    assert ours < 2 * stock


@pytest.mark.usefixtures("no_compiler", "stock_sums")
def test_with_a_gpus_row_counts_and_sums_every_way_of_feeding_gives_equal_bits(wide, monkeypatch):
    # What the switch does on a GPU, but for its kernels.
    monkeypatch.setattr(rows, "_known", {})
    monkeypatch.setattr(rows, "HOST", rows.GPU)
    table = replacements() | SUMS
    monkeypatch.setattr(switch, "_of", lambda *_: table)
    assert [(found.equal_rows, found.rows) for found in verify(wide, TOKENS)] == [(40, 40)] * 7
    assert {counts.sizes for counts in rows._known.values()} == {rows.GPU}


@pytest.mark.parametrize("by_norm", [True, False])
@pytest.mark.parametrize("width", [1, 7, 128, 576])
def test_a_rows_sum_and_mean_keep_their_bits_among_any_number_of_rows(monkeypatch, by_norm, width, stock_sums):
    if not by_norm:
        monkeypatch.setattr(sums, "_norm_holds", lambda *_: False)
    x = torch.randn(37, width, generator=torch.Generator().manual_seed(width))
    for function, true in ((sums.mean, x.double().mean(-1)), (sums.total, x.double().sum(-1))):
        together = function(x, [-1])
        for count in (1, 2, 5, 16):
            assert torch.equal(torch.cat([function(part, [-1]) for part in x.split(count)]), together)
        assert torch.allclose(together.double(), true, rtol=1e-5, atol=1e-5)


def test_sums_take_the_arguments_of_torchs_own(stock_sums):
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    dims = ([0], [1], [-1], [0, 2], [2, 0], [0, 1, 2], [], None)
    for ours, theirs in ((sums.mean, torch.mean), (sums.total, torch.sum)):
        for dim, keepdim in itertools.product(dims, (False, True)):
            torch.testing.assert_close(ours(x, dim, keepdim), theirs(x, dim, keepdim=keepdim), rtol=0, atol=1e-6)
        assert ours(x.bfloat16(), [-1]).dtype == torch.bfloat16
        assert ours(x.bfloat16(), [-1], dtype=torch.float32).dtype == torch.float32
        assert ours(x[:0], [-1]).shape == (0, 4)
        assert torch.equal(ours(torch.tensor(3.0), None), torch.tensor(3.0))
    assert torch.equal(sums.total(torch.arange(6).view(2, 3), [1]), torch.tensor([3, 12]))


@pytest.mark.parametrize("error", [0, 1e-6])
def test_a_layer_norm_whose_mean_changes_with_the_number_of_rows_is_not_used(error, monkeypatch):
    # Additions of whole tensors: the same on any processor.
    monkeypatch.setattr(sums, "_by_norm", lambda x: sums._in_pairs(x) / x.shape[-1] * (1 + error * (len(x) < 16)))
    assert sums._norm_holds.__wrapped__(64, torch.float32, torch.device("cpu")) is (error == 0)


def test_weights_that_come_anew_at_every_step_are_not_kept():
    x = torch.randn(1, 32)
    with torch.inference_mode(), row_invariant():
        for _ in range(5):
            weight = torch.nn.Parameter(torch.randn(16, 32))
            torch.nn.functional.linear(x, weight)
            assert list(steps._known) == [id(weight)]
        del weight
        assert not steps._known


@pytest.mark.parametrize("name", ["std.correction", "var_mean.correction", "prod.dim_int", "sum.IntList_out"])
def test_what_shares_a_row_out_on_a_gpu_is_refused_there_and_exists(name):
    assert switch._REFUSED_ON_A_GPU.match(f"aten::{name}")
    assert f"aten::{name}" in torch._C._dispatch_get_all_op_names()
    assert not switch._REFUSED_ON_A_GPU.match("aten::sum.dim_IntList")


def test_what_a_user_can_set_on_a_gpu_can_be_read():
    assert len(rows._modes(SimpleNamespace(is_cuda=True))) == 4
    assert rows._modes(torch.empty(1)) == ()
