"""The switch as a switch: on, off, refusing, and its own controls."""

import itertools
import threading

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, XGLMConfig, XGLMForCausalLM

from kvbook.errors import UserError
from kvbook.exact import (
    NotInvariant,
    attention_kernel,
    is_on,
    row_invariant,
    rows,
    steps,
    sums,
    switch,
    verify,
    visible,
)
from kvbook.exact.kernels import base


@pytest.fixture(scope="module")
def wide():
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=320, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, initializer_range=0.05,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(3, 320, (1, 40), generator=torch.Generator().manual_seed(7))


def one_by_one(model, ids):
    cache = DynamicCache(config=model.config)
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(1, 1)], 1)


def test_everything_is_restored_on_leaving_also_by_an_exception(wide, tokens):
    from transformers.models.mpt.modeling_mpt import MptAttention

    stock = MptAttention.forward
    with torch.inference_mode():
        before = wide(tokens).logits
        with row_invariant():
            assert is_on()
            wide(tokens)
            with pytest.raises(NotInvariant, match="conv"):
                torch.nn.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2))
        with pytest.raises(RuntimeError, match="ours"), row_invariant():
            raise RuntimeError("ours")
        assert torch.equal(wide(tokens).logits, before)
    assert not is_on()
    assert MptAttention.forward is stock
    torch.nn.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2))


def test_blocks_nest_and_give_the_same_bits_each_time(wide, tokens):
    with torch.inference_mode():
        with row_invariant():
            with row_invariant():
                inner = wide(tokens).logits
            assert is_on()
            outer = one_by_one(wide, tokens)
        with row_invariant():
            again = wide(tokens).logits
    assert torch.equal(inner, outer)
    assert torch.equal(inner, again)


def test_another_thread_is_under_it_too_while_one_is_inside(wide, tokens):
    found = []

    def work():
        with torch.inference_mode():
            found.append(wide(tokens).logits)

    with torch.inference_mode(), row_invariant():
        expected = wide(tokens).logits
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_it_works_with_autograd_off_and_says_so_where_it_is_on(wide, tokens, mode):
    with mode(), row_invariant():
        assert torch.equal(wide(tokens).logits, one_by_one(wide, tokens))
    with row_invariant(), pytest.raises(NotInvariant, match="no_grad") as error:
        wide(tokens)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, UserError)


def _packed(x):
    return torch.ops.mkldnn._linear_pointwise(x, torch.ones(8, 8), None, "none", [], "")


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: torch.nn.functional.conv2d(x[None], torch.ones(1, 1, 2, 2)), "conv"),
        (lambda x: torch.nn.functional.conv1d(x[None], torch.ones(4, 4, 1), stride=2), "stride"),
        (lambda x: torch.mv(x, torch.ones(8)), "mv"),
        (lambda x: torch.addcmul(x, x, x, value=0.3), "addcmul"),
        (lambda x: torch.linalg.inv(x @ x.T), "linalg"),
        (lambda x: torch.mm(x, torch.ones(8, 2), out=torch.empty(4, 2)), r"mm\.out"),
        (lambda x: torch._int_mm(torch.ones(32, 32).to(torch.int8), torch.ones(32, 32).to(torch.int8)), "int_mm"),
        (_packed, "mkldnn"),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.1), "dropout"),
    ],
)
def test_what_it_cannot_make_invariant_is_refused_by_name(operation, name):
    x = torch.randn(4, 8)
    with torch.inference_mode():
        with row_invariant(), pytest.raises(NotInvariant, match=name) as error:
            operation(x)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("skipped", [True, False], ids=["as it is", "control: the padding is not left out"])
def test_padding_on_the_left_changes_no_bit_where_scores_have_three_dimensions(skipped, monkeypatch):
    if not skipped:
        monkeypatch.setattr(visible, "run", lambda seen: (0, seen.shape[-1]))
    config = XGLMConfig(
        vocab_size=320, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=256,
        init_std=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=1,
    )
    model = XGLMForCausalLM(config).eval()
    # Longer than a block of keys: padding that is not left out moves the blocks' ends, whatever adds up within them.
    ids, n = torch.arange(3, 163)[None], 7
    padded = torch.cat([torch.zeros(1, n, dtype=torch.long), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :n] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode(), row_invariant():
        found = model(padded, attention_mask=mask, position_ids=positions).logits[:, n:]
        assert torch.equal(found, model(ids).logits) is skipped


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [
        *itertools.product((torch.float32, torch.bfloat16, torch.float16, torch.int64), (2, 2.0, 3, 0.5)),
        (torch.float32, 2 + 0j),
    ],
)
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

    def call(x, *arguments, **options):
        return function(x, *arguments, **options) * (1 + 2.0**-12 * (x.shape[-2] == 1))

    return call


@pytest.mark.parametrize("planted", ["aten::linear", "aten::scaled_dot_product_attention", "aten::mm", "aten::silu"])
def test_control_one_operation_that_changes_with_the_number_of_rows_is_caught(tokens, planted, monkeypatch):
    # Odd widths, so that loops leave something over.
    torch.manual_seed(8)
    config = LlamaConfig(
        vocab_size=320, hidden_size=90, intermediate_size=151, num_hidden_layers=2, num_attention_heads=5, head_dim=18,
        num_key_value_heads=5, initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    table = replacements()
    if planted == "aten::mm":
        # What torch's own linear is made of, once it is left to itself.
        table = {name: function for name, function in table.items() if name not in ("aten::linear", "aten::matmul")}
    with torch.inference_mode():
        for function, exact in ((table[planted], True), (uneven(table[planted]), False)):
            monkeypatch.setattr(switch, "_of", lambda *_, found=table | {planted: function}: found)
            with row_invariant():
                assert torch.equal(model(tokens).logits, one_by_one(model, tokens)) is exact


def test_torchs_own_linear_goes_through_the_replaced_product_too():
    x, weight = torch.randn(5, 96), torch.randn(64, 96)
    with torch.inference_mode(), row_invariant():
        ways = [torch.nn.functional.linear(x, weight), x @ weight.T, torch.mm(x, weight.T),
                torch.addmm(torch.zeros(64), x, weight.T), torch.einsum("ik,jk->ij", x[:, None].squeeze(1), weight)]
    assert all(torch.equal(ways[0], way) for way in ways[:4])
    assert torch.allclose(ways[0], ways[4], atol=1e-4)


def test_a_row_count_is_used_only_if_its_bits_equal_the_tiles(monkeypatch):
    def depends_on_rows(x, weight, bias):
        # Row by row, so that it is honest anywhere; which counts torch's own product would be granted is the
        # processor's affair.
        out = torch.stack([(row[:, None] * weight).sum(0) for row in x])
        return out if len(x) in (16, 64) else out * (1 + 1e-6)

    monkeypatch.setattr(rows, "_product", depends_on_rows)
    monkeypatch.setattr(rows, "_known", {})
    weight = torch.randn(32, 24)
    counts = rows._row_counts(weight, None)
    assert [piece.size for piece in counts.plan(101, weight, None)] == [64, 16, 16, 16]
    assert [piece.size for piece in counts.plan(1, weight, None)] == [16]


def test_a_count_that_is_refused_is_tried_on_fewer_columns(monkeypatch, no_compiler):
    def depends_on_columns(x, weight, bias):
        out = torch.stack([(row[:, None] * weight).sum(0) for row in x])
        # What a library with kernels of its own for wide matrices might do.
        return out if len(x) <= 16 or weight.shape[1] <= 256 else out * (1 + 1e-6)

    monkeypatch.setattr(rows, "_product", depends_on_columns)
    monkeypatch.setattr(rows, "_known", {})
    weight, bias, x = torch.randn(8, 1024), torch.randn(1024), torch.randn(37, 8)
    pieces = rows._row_counts(weight, None).plan(37, weight, None)
    assert [(piece.start, piece.count, piece.size, piece.cuts) for piece in pieces] == [(0, 32, 32, 4), (32, 5, 8, 1)]
    assert torch.equal(rows.product(x, weight)[:16], depends_on_columns(x[:16], weight, bias))
    # Control: uncut, the wide product of so many rows has other bits.
    assert not torch.equal(depends_on_columns(x, weight, bias)[:16], depends_on_columns(x[:16], weight, bias))


def test_columns_are_cut_with_their_bias_and_put_together_in_order():
    x, weight, bias = torch.randn(3, 8), torch.randn(8, 12), torch.randn(12)
    torch.testing.assert_close(rows._in_columns(x, weight, bias, 4), x @ weight + bias)
    torch.testing.assert_close(rows._in_columns(x, weight, None, 4), x @ weight)


def test_where_rows_of_a_tile_are_not_alike_every_row_goes_alone(monkeypatch, no_compiler):
    honest = rows._product

    def depends_on_place(x, weight, bias):
        return honest(x, weight, bias) * (1 + 1e-6 * torch.arange(len(x)))[:, None]

    monkeypatch.setattr(rows, "_product", depends_on_place)
    monkeypatch.setattr(rows, "_known", {})
    for name in ("aten::mm", "aten::addmm", "aten::bmm"):
        base(name, "CPU")
    weight, x = torch.randn(32, 24), torch.randn(5, 32)
    out = rows.product(x, weight)
    assert all(torch.equal(out[i : i + 1], rows.product(x[i : i + 1], weight)) for i in range(5))


def in_32_bits(x, weight):
    return x.float() @ weight.float()


def in_turn(x, weight):
    """Add up one product after the other: what is added to what is the same on every processor."""
    total = torch.zeros(x.shape[0], weight.shape[1])
    for i in range(x.shape[1]):
        # Products of 16-bit numbers are exact in 32 bits, so that a fused multiplication and addition gives no other
        # bits.
        total = total + x[:, i : i + 1].float() * weight[i].float()
    return total


def cut(product, x, weight, at):
    """Add up in two parts: another order, unless it is the one in which the product adds up by itself."""
    return product(x[:, :at], weight[:at]) + product(x[:, at:], weight[at:])


def telling_cut(product, x, weight) -> int | None:
    """Search, from the middle on, for a cut that gives most elements other bits in 32 bits; None where none does."""
    inner, whole = x.shape[1], product(x, weight)
    cuts = sorted(range(1, inner), key=lambda at: abs(at - inner // 2))
    return next((at for at in cuts if (cut(product, x, weight, at) != whole).float().mean() > 0.5), None)


def differing(product, x, weight, at) -> float:
    """Give the share of elements whose bits a cut changes behind 16 bits."""
    return (cut(product, x, weight, at).to(x.dtype) != product(x, weight).to(x.dtype)).float().mean().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", [in_turn, in_32_bits], ids=["one after the other", "as this machine adds up"])
def test_the_comparison_of_kernels_sees_another_order_of_addition_behind_16_bits(dtype, product):
    """Random numbers hide it: rounding to 16 bits makes the two sums equal in nearly all elements."""
    plain = torch.randn(16, 576).to(dtype), torch.randn(576, 192).to(dtype)
    x, weight, _ = rows._telling(16, torch.empty(576, 192, dtype=dtype), None)
    at = telling_cut(product, *plain)
    if at is None:
        # No cut of this product is another order: then what tells orders apart must find none either.
        assert telling_cut(product, x, weight) is None
        return
    assert differing(product, x, weight, at) > 0.5
    assert differing(product, *plain, at) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_of_a_product_that_adds_up_in_halves_have_its_bits_and_another_cut_is_found(dtype):
    # 2 ** -24 is lost when it is added to 1, and two of them together are not.
    x, weight = torch.ones(1, 4, dtype=dtype), torch.tensor([[1.0], [2.0**-24], [2.0**-24], [2.0**-24]]).to(dtype)
    assert in_turn(x, weight).item() == 1

    def in_halves(x, weight):
        return cut(in_turn, x, weight, 2) if len(weight) == 4 else in_turn(x, weight)

    assert in_halves(x, weight).item() == 1 + 2.0**-23
    # The failing control: with these halves nothing is seen, though the order in turn is another one.
    assert torch.equal(cut(in_halves, x, weight, 2), in_halves(x, weight))
    assert telling_cut(in_turn, x, weight) == 2
    assert telling_cut(in_halves, x, weight) == 1
    # Where additions are exact there is no other order to be seen.
    assert telling_cut(lambda x, weight: x.double() @ weight.double(), x, weight) is None


@pytest.mark.parametrize("inner", [2, 16, 576])
def test_in_64_bits_products_are_compared_on_numbers_whose_products_are_rounded(inner):
    """Products of 32-bit numbers are exact in 64 bits: they do not tell a fused multiplication and addition from two."""
    for x, weight, _ in rows._tellings(16, torch.empty(inner, 48, dtype=torch.float64), None):
        assert (x != x.float()).float().mean() > 0.9
        assert (weight != weight.float()).float().mean() > 0.9


# 4 to 7: so few terms that sums which are zero do not tell whether a product is rounded before it is added.
@pytest.mark.parametrize("inner", [1, 2, 3, 4, 5, 7, 8, 31, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_products_of_any_shape_give_a_row_its_bits(dtype, inner):
    generator = torch.Generator().manual_seed(inner)
    for columns, biased in itertools.product((1, 4, 5, 8, 33), (False, True)):
        layer = torch.nn.Linear(inner, columns, biased, dtype=dtype)
        x = torch.randn(37, inner, generator=generator, dtype=torch.float64).to(dtype)
        with torch.inference_mode(), row_invariant():
            whole = layer(x)
            for size in (1, 3):
                assert torch.equal(torch.cat([layer(part) for part in x.split(size)]), whole), (columns, biased, size)


def _in_turn(query, key, value, bias, scale, cut=0):
    """Attend so that every sum is added up one after the other, on any processor; in two sums where there is a cut."""

    def added(left, right):
        total = torch.zeros(*left.shape[:-1], right.shape[-1])
        for i in range(left.shape[-1]):
            total = total + left[..., i, None] * right[..., None, i, :]
        return total

    scores = added(query.float(), key.float().transpose(2, 3)) * scale + bias.float()
    weights, values = (scores - scores.amax(-1, keepdim=True)).exp(), value.float()
    weights = weights / added(weights, torch.ones(weights.shape[-1], 1))
    first = added(weights[..., :cut], values[:, :, :cut])
    return (first + added(weights[..., cut:], values[:, :, cut:])).to(query.dtype)


def _in_an_order_of_its_own(query, key, value, bias, scale):
    """Attend as a kernel that adds up what several heads see in another order than what one head sees."""
    return _in_turn(query, key, value, bias, scale, cut=key.shape[2] // 2 if query.shape[1] > 1 else 0)


@pytest.mark.parametrize("width", [16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_comparison_of_attention_sees_another_order_of_addition(dtype, width, monkeypatch):
    monkeypatch.setattr(attention_kernel, "kernel", _in_an_order_of_its_own)
    assert not attention_kernel._try(torch.empty(0, width, dtype=dtype), 4, 4, 256, dtype)


def test_control_scores_so_large_that_a_query_sees_one_pair_of_keys_tell_nothing(monkeypatch):
    monkeypatch.setattr(attention_kernel, "kernel", _in_an_order_of_its_own)
    monkeypatch.setattr(attention_kernel, "_LEFT_OVER", 2.0**30)
    assert attention_kernel._try(torch.empty(0, 64, dtype=torch.float16), 4, 4, 256, torch.float16)


def told_apart(dtype, width, heads, queries, keys) -> bool:
    """Tell whether random numbers have other bits than the reference gives them: one head, four queries, whole blocks."""
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(1, heads, n, width, generator=generator).to(dtype) for n in (queries, keys, keys))
    bias = torch.zeros(1, 1, queries, keys, dtype=dtype)
    bias.masked_fill_(torch.arange(keys) > torch.linspace(0, keys - 1, queries)[:, None], float("-inf"))
    tried = attention_kernel.kernel(q, k, v, bias, width**-0.5)
    k, v = (torch.constant_pad_nd(x, (0, 0, 0, 512 - keys)) for x in (k, v))
    bias = torch.constant_pad_nd(bias, (0, 512 - keys), float("-inf"))
    for head, start in itertools.product(range(heads), range(0, queries, 4)):
        one, some = slice(head, head + 1), slice(start, start + 4)
        expected = attention_kernel.kernel(
            *(rows.lined_up(x) for x in (q[:, one, some], k[:, one], v[:, one])), bias[:, :, some].contiguous(),
                width**-0.5
        )
        if not torch.equal(tried[:, one, some], expected):
            return True
    return False


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_shape_of_attention_is_allowed_that_random_numbers_tell_from_the_reference(dtype, width):
    base(attention_kernel.KERNELS["CPU"], "CPU")
    like = torch.empty(0, width, dtype=dtype)
    shapes = itertools.product((1, 4, 9), (4, 32), (128, 256, 512))
    allowed = [shape for shape in shapes if attention_kernel.allows(like, *shape, dtype)]
    assert allowed
    assert [shape for shape in allowed if told_apart(dtype, width, *shape)] == []


def test_control_random_numbers_tell_another_order_of_addition_in_attention(monkeypatch):
    monkeypatch.setattr(attention_kernel, "kernel", _in_an_order_of_its_own)
    assert told_apart(torch.float32, 64, 4, 4, 256)
    assert not told_apart(torch.float32, 64, 1, 4, 512)


def test_verify_finds_every_way_equal_and_says_how_many_rows(wide, tokens):
    found = verify(wide, tokens)
    assert len(found) == 7
    assert {d.rows for d in found} == {40}
    assert all(d.equal_rows == d.rows and d.largest == 0 for d in found)


def test_it_is_as_near_to_the_truth_as_stock(wide, tokens):
    import copy

    truth = copy.deepcopy(wide).double()
    with torch.inference_mode():
        exact = truth(tokens).logits
        stock = (wide(tokens).logits - exact).square().mean().sqrt()
        with row_invariant():
            ours = (wide(tokens).logits - exact).square().mean().sqrt()
    assert ours < 2 * stock


@pytest.fixture
def as_on_a_gpu(monkeypatch, no_compiler):
    """Let a CPU do what the switch does on a GPU, but for its kernels: the row counts, and sums of its own."""
    monkeypatch.setattr(rows, "_known", {})
    monkeypatch.setattr(rows, "sizes_on", lambda device: rows.GPU)
    table = replacements()
    for name, function in (("aten::mean.dim", sums.mean), ("aten::sum.dim_IntList", sums.total)):
        base(name, "CPU")
        table[name] = function
    monkeypatch.setattr(switch, "_of", lambda *_: table)


def test_with_a_gpus_row_counts_and_sums_every_way_of_feeding_gives_equal_bits(as_on_a_gpu, wide, tokens):
    assert all(found.equal_rows == found.rows for found in verify(wide, tokens))
    assert {counts.sizes for counts in rows._known.values()} == {rows.GPU}


def test_control_sums_that_change_with_the_number_of_rows_are_seen(as_on_a_gpu, wide, tokens, monkeypatch):
    def shared_out(x):
        # As a GPU does: in more parts where there are fewer rows.
        parts = 64 if x.shape[:-1].numel() == 1 else 8
        added, *others = x.unflatten(-1, (parts, -1)).unbind(-1)
        for each in others:
            added = added + each
        return sums._in_pairs(added) / x.shape[-1]

    monkeypatch.setattr(sums, "_mean", shared_out)
    assert not all(found.equal_rows == found.rows for found in verify(wide, tokens))


@pytest.mark.parametrize("by_norm", [True, False])
@pytest.mark.parametrize("width", [1, 7, 128, 576])
def test_a_rows_sum_and_mean_keep_their_bits_among_any_number_of_rows(monkeypatch, by_norm, width):
    if not by_norm:
        monkeypatch.setattr(sums, "_norm_holds", lambda *_: False)
    for name in ("aten::mean.dim", "aten::sum.dim_IntList"):
        base(name, "CPU")
    x = torch.randn(37, width, generator=torch.Generator().manual_seed(width))
    for function, true in ((sums.mean, x.double().mean(-1)), (sums.total, x.double().sum(-1))):
        together = function(x, [-1])
        for count in (1, 2, 5, 16):
            assert torch.equal(torch.cat([function(part, [-1]) for part in x.split(count)]), together)
        assert torch.allclose(together.double(), true, rtol=1e-5, atol=1e-5)


def test_sums_take_the_arguments_of_torchs_own(monkeypatch):
    for name in ("aten::mean.dim", "aten::sum.dim_IntList"):
        base(name, "CPU")
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    for ours, theirs in ((sums.mean, torch.mean), (sums.total, torch.sum)):
        for dim in ([0], [1], [-1], [0, 2], [2, 0], [0, 1, 2], [], None):
            for keepdim in (False, True):
                expected = theirs(x, dim, keepdim=keepdim)
                found = ours(x, dim, keepdim)
                assert found.shape == expected.shape
                assert torch.allclose(found, expected, atol=1e-6)
        assert ours(x.bfloat16(), [-1]).dtype == torch.bfloat16
        assert ours(x.bfloat16(), [-1], dtype=torch.float32).dtype == torch.float32
        assert ours(x[:0], [-1]).shape == (0, 4)
        assert torch.equal(ours(torch.tensor(3.0), None), torch.tensor(3.0))
    assert torch.equal(sums.total(torch.arange(6).view(2, 3), [1]), torch.tensor([3, 12]))


def test_a_layer_norm_whose_mean_changes_with_the_number_of_rows_is_not_used(monkeypatch):
    # Additions of whole tensors: honest on any processor.
    def honest(x):
        return sums._in_pairs(x) / x.shape[-1]

    monkeypatch.setattr(sums, "_by_norm", lambda x: honest(x) * (1 + 1e-6 * (len(x) < 16)))
    assert not sums._norm_holds.__wrapped__(64, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(sums, "_by_norm", honest)
    assert sums._norm_holds.__wrapped__(64, torch.float32, torch.device("cpu"))


def test_weights_that_come_anew_at_every_step_are_not_kept():
    x = torch.randn(1, 32)
    with torch.inference_mode(), row_invariant():
        for _ in range(5):
            weight = torch.nn.Parameter(torch.randn(16, 32))
            torch.nn.functional.linear(x, weight)
            assert list(steps._known) == [id(weight)]
        del weight
        assert not steps._known


def test_what_a_library_brings_after_the_first_block_is_refused_too():
    with row_invariant():
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        library.define("kvbook_late(Tensor x) -> Tensor")
        library.impl("kvbook_late", lambda x: x + 1, "CPU")
        assert torch.equal(torch.ops.torchvision.kvbook_late(torch.ones(1)), torch.full((1,), 2.0))
        with row_invariant(), pytest.raises(NotInvariant, match="kvbook_late"):
            torch.ops.torchvision.kvbook_late(torch.ones(1))
    finally:
        library._destroy()


def test_a_kernel_that_blocks_behind_the_last_key_change_is_not_trusted(monkeypatch):
    honest = _in_turn

    def divides_in_another_place(query, key, value, bias, scale):
        # As torch's for wide heads on a GPU: a block behind a query's last key moves where a result is rounded.
        out = honest(query, key, value, bias, scale)
        last = bias[:, :, :, -attention_kernel.BLOCK :].isfinite().any(-1)[..., None]
        return torch.where(last, out, out * (1 + 1e-6))

    like = torch.empty(0, 64)
    monkeypatch.setattr(attention_kernel, "kernel", honest)
    assert attention_kernel._blocks_behind_change_nothing(like)
    monkeypatch.setattr(attention_kernel, "kernel", divides_in_another_place)
    assert not attention_kernel._blocks_behind_change_nothing(like)


def test_what_a_user_can_set_on_a_gpu_can_be_read():
    class OnAGpu:
        is_cuda = True

    assert len(rows._modes(OnAGpu())) == 4
    assert rows._modes(torch.empty(1)) == ()


@pytest.mark.parametrize(
    "name", ["aten::std.correction", "aten::var_mean.correction", "aten::prod.dim_int", "aten::sum.IntList_out"]
)
def test_what_shares_a_row_out_on_a_gpu_is_refused_there_and_exists(name):
    assert switch._REFUSED_ON_A_GPU.match(name)
    assert name in torch._C._dispatch_get_all_op_names()
    assert not switch._REFUSED_ON_A_GPU.match("aten::sum.dim_IntList")
