"""Equal-input replay: an operation that differs by itself is found and named, and no other one is."""

import operator

import pytest
import torch
from torch.nn import functional
from torch.nn.modules import module as hooks

from kvbook.atlas import configurations, invariance
from kvbook.exact import row_invariant
from kvbook.measuring import agreement, full_and_split, replay

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def llama():
    return configurations.build("llama")


@pytest.mark.parametrize("family", ["llama", "phi", "gpt2", "mpt", "falcon", "mistral"])
def test_every_operation_of_a_stock_model_is_recorded_and_replayed_on_equal_inputs(family, ids):
    model = configurations.build(family)
    plain = model(ids, use_cache=False).logits
    full, cache = replay.record(model, ids)
    last = list(full.values())[-1]
    assert (last.operation, last.kind) == ("lm_head", "lm head")
    assert agreement.bits_equal(last.output, plain).all()
    assert agreement.bits_equal(model(ids, use_cache=False).logits, plain).all()
    held = full_and_split.states_of(cache)
    modules = [n for n, m in model.named_modules() if ".0." in n and type(m).__name__.endswith(("Linear", "Conv1D"))]
    for rows in (1, 3, 16, ids.shape[1]):
        verdicts = replay.replay_last(model, ids, full, cache, rows)
        assert [verdict.call.order for verdict in verdicts] == list(range(len(full)))
        assert all(verdict.inputs_equal for verdict in verdicts)
        assert len({one.call.operation for one in verdicts if one.call.kind == "linear"}) == len(modules)
    # Control: the last replay was of all rows.
    assert all(verdict.differing == 0 for verdict in verdicts)
    assert all(map(operator.is_, held, full_and_split.states_of(cache)))
    # Of the first rows, ALiBi alone has other inputs.
    first = replay.replay_first(model, ids, full, ids.shape[1] - 1)
    unequal = {verdict.call.operation for verdict in first if not verdict.inputs_equal}
    assert unequal == ({"attn: elementwise"} if family == "mpt" else set())


def inject(model, path, wrong) -> None:
    module = model.get_submodule(path)
    stock = module.forward
    module.forward = lambda x, *rest: wrong(stock(x, *rest), x)


def depends_on_rows(output, x):
    # One row is computed a little otherwise than several: what a library does, written so that it does so anywhere.
    return output * (1.01 if x.shape[-2] == 1 else 1.0)


def own(verdicts) -> set[tuple[int | None, str]]:
    return {(one.call.layer, one.call.operation) for one in verdicts if one.differing and one.inputs_equal}


@pytest.mark.parametrize("path", ["input_layernorm", "mlp.act_fn", "self_attn.k_proj", "mlp.down_proj"])
def test_an_injected_operation_that_depends_on_the_number_of_rows_is_named_and_no_other_one_is_blamed(llama, ids, path):
    full, cache = replay.record(llama, ids)
    # Which operations of the library differ, and at how many rows, is the processor's affair.
    clean = {rows: own(replay.replay_last(llama, ids, full, cache, rows)) for rows in (16, 1)}
    inject(llama, f"model.layers.1.{path}", depends_on_rows)
    full, cache = replay.record(llama, ids)
    assert own(replay.replay_last(llama, ids, full, cache, 16)) == clean[16]
    assert own(replay.replay_last(llama, ids, full, cache, 1)) == clean[1] | {(1, path)}


def test_an_injected_dependence_on_later_rows_is_found_in_the_first_rows(llama, ids):
    inject(llama, "model.layers.1.mlp.act_fn", lambda output, x: output * (1.01 if x.shape[-2] < ids.shape[1] else 1.0))
    full, _ = replay.record(llama, ids)
    assert (1, "mlp.act_fn") in own(replay.replay_first(llama, ids, full, ids.shape[1] - 1))


def test_an_operation_that_the_full_pass_does_not_have_is_refused_by_name(llama, ids):
    full, cache = replay.record(llama, ids)
    inject(llama, "model.layers.1.mlp.up_proj", lambda output, x: torch.tanh(output))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp.*tanh has no counterpart"):
        replay.replay_last(llama, ids, full, cache, 1)


def test_nothing_watches_models_after_an_error(llama, ids):
    inject(llama, "model.layers.1.mlp.up_proj", lambda output, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replay.record(llama, ids)
    assert hooks._global_forward_hooks == hooks._global_forward_pre_hooks == {}


def test_bits_equal_tells_zero_from_minus_zero_and_refuses_what_cannot_be_compared():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([float("nan")])
    assert agreement.bits_equal(zero, -zero).tolist() == [False, False]
    assert agreement.bits_equal(torch.cat([zero, nan]), torch.cat([zero, nan])).all()
    with pytest.raises(ValueError, match="float32 against"):
        agreement.bits_equal(zero, zero.half())


# The first operation that depends on the number of tokens: found on a model into which one was injected.

IDS = configurations.text(24)


def first(model):
    with row_invariant():
        return replay.first_operation(model, IDS, (1, 5, 23))


# The second: padding before a convolution is no difference.
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_where_nothing_depends_on_the_number_of_tokens_there_is_none(architecture):
    assert first(configurations.build(architecture)) is None


@pytest.mark.parametrize(
    ("layer", "operation", "kind"),
    # What the second of these changes is carried on by all later operations, which are not named.
    [(1, "mlp.up_proj", "linear"), (0, "mlp.down_proj", "linear"), (1, "input_layernorm", "norm")],
)
def test_an_injected_operation_is_found_by_layer_name_and_kind_and_what_carries_it_on_is_not(layer, operation, kind):
    model = configurations.build("llama")
    module = model.get_submodule(f"model.layers.{layer}.{operation}")
    function = functional.linear if kind == "linear" else torch.mul
    weight, other = module.weight.detach(), module.weight.detach() * (1 + 2**-10)
    # As a library that has another kernel for fewer rows.
    module.forward = lambda x: function(x, weight if x.shape[1] == IDS.shape[1] else other)
    found = first(model)
    call = found.call
    assert (call.layer, call.operation, call.kind, found.on_equal_inputs) == (layer, operation, kind, True)
    assert found.function == function.__name__


def test_the_atlas_names_it_in_both_dtypes():
    found = invariance.first_operations("mixtral", "cpu", IDS)
    assert set(found) == {f"first {what}, {dtype}" for what in ("operation", "kind") for dtype in invariance.SWITCHED}
    assert set(found.values()).isdisjoint({"fails"})
