"""Equal-input replay: an operation that differs by itself is found and named, and no other one is."""

import copy
import types

import pytest
import torch
from small_models import SMALL
from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, LlamaConfig, MptConfig, Qwen2Config

from kvbook.measuring import agreement, replay
from kvbook.measuring import full_and_split as passes

ROPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, **ROPE, intermediate_size=48),
    "smollm2": LlamaConfig(**SMALL, **ROPE, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, **ROPE, intermediate_size=48, num_key_value_heads=2),
    "gpt2": GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mpt": MptConfig(**SMALL, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "falcon": FalconConfig(**SMALL, **ROPE, multi_query=True, parallel_attn=True, alibi=False, bias=False),
}


def build(family: str):
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))
    return model.eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("family", CONFIGS)
def test_every_operation_of_a_stock_model_is_recorded_and_replayed_on_equal_inputs(family, ids):
    model = build(family)
    plain = model(ids, use_cache=False).logits
    full, cache = replay.record(model, ids)
    last = list(full.values())[-1]
    assert (last.operation, last.kind) == ("lm_head", "lm head")
    assert agreement.bits_equal(last.output, plain).all()
    assert agreement.bits_equal(model(ids, use_cache=False).logits, plain).all()
    held = [states.clone() for states in passes.states_of(cache)]
    suffixes = ("Linear", "Conv1D")
    modules = [n for n, m in model.named_modules() if ".0." in n and type(m).__name__.endswith(suffixes)]
    for rows in (1, 3, 16, ids.shape[1]):
        verdicts = replay.replay_last(model, ids, full, cache, rows)
        assert [verdict.call.order for verdict in verdicts] == list(range(len(full)))
        assert all(verdict.inputs_equal for verdict in verdicts)
        assert len({one.call.operation for one in verdicts if one.call.kind == "linear"}) == len(modules)
    # Control: the last replay was of all rows.
    assert all(verdict.differing == 0 for verdict in verdicts)
    assert all(agreement.bits_equal(*pair).all() for pair in zip(held, passes.states_of(cache), strict=True))
    # Of the first rows, ALiBi alone has other inputs.
    first = replay.replay_first(model, ids, full, ids.shape[1] - 1)
    unequal = {verdict.call.operation for verdict in first if not verdict.inputs_equal}
    assert unequal == ({"attn: elementwise"} if family == "mpt" else set())


def inject(module, wrong) -> None:
    stock = module.forward
    module.forward = types.MethodType(lambda self, x, *rest: wrong(stock(x, *rest), x), module)


def depends_on_rows(output, x):
    # One row is computed a little otherwise than several: what a library does, written so that it does so anywhere.
    return output * (1.01 if x.shape[-2] == 1 else 1.0)


def own(verdicts) -> set[tuple[int | None, str]]:
    return {(one.call.layer, one.call.operation) for one in verdicts if one.differing and one.inputs_equal}


@pytest.mark.parametrize("path", ["input_layernorm", "mlp.act_fn", "self_attn.k_proj", "mlp.down_proj"])
def test_an_injected_operation_that_depends_on_the_number_of_rows_is_named_and_no_other_one_is_blamed(ids, path):
    model = build("llama")
    full, cache = replay.record(model, ids)
    # Which operations of the library differ, and at how many rows, is the processor's affair.
    clean = {rows: own(replay.replay_last(model, ids, full, cache, rows)) for rows in (16, 1)}
    inject(model.get_submodule(f"model.layers.1.{path}"), depends_on_rows)
    full, cache = replay.record(model, ids)
    assert own(replay.replay_last(model, ids, full, cache, 16)) == clean[16]
    assert own(replay.replay_last(model, ids, full, cache, 1)) == clean[1] | {(1, path)}


def test_without_correction_an_injected_difference_spreads_to_the_logits(ids):
    model = build("llama").double()
    inject(model.model.layers[0].mlp.act_fn, depends_on_rows)
    full, _ = replay.record(model, ids)
    real = replay.replay_last(model, ids, full, passes.prefill(model, ids[:, :-1]), 1, corrected=False)
    assert real[-1].call.operation == "lm_head"
    assert not real[-1].inputs_equal
    # In double precision what is propagated stands out from rounding by orders of magnitude.
    before = [one.relative_rms for one in real if one.call.layer == 0 and one.call.operation.startswith("self_attn")]
    assert real[-1].relative_rms > 1e6 * max(before)


def test_an_injected_dependence_on_later_rows_is_found_in_the_first_rows(ids):
    model = build("gpt2")
    inject(model.transformer.h[1].ln_2, lambda output, x: output * (1.0 if x.shape[-2] == ids.shape[1] else 1.01))
    full, _ = replay.record(model, ids)
    assert (1, "ln_2") in own(replay.replay_first(model, ids, full, ids.shape[1] - 1))


def test_an_operation_that_the_full_pass_does_not_have_is_refused_by_name(ids):
    model = build("llama")
    full, cache = replay.record(model, ids)
    inject(model.model.layers[1].mlp.up_proj, lambda output, x: torch.tanh(output))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp.*tanh has no counterpart"):
        replay.replay_last(model, ids, full, cache, 1)


def test_nothing_is_left_on_the_model_after_an_error(ids):
    model = build("llama")
    inject(model.model.layers[1].mlp.up_proj, lambda output, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replay.record(model, ids)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("shape", "first", "cut"),
    [
        ((1, 2, 2, 3), False, lambda full: full[..., 2:, :]), ((1, 2, 2, 3), True, lambda full: full[..., :2, :]),
        ((1, 4, 4, 3), False, lambda full: full.repeat_interleave(2, 1)), ((2, 4, 3), False, None),
        ((1, 2, 5, 3), False, None),
    ],
)
def test_rows_are_cut_from_either_end_and_unexplained_shapes_are_refused(shape, first, cut):
    full = torch.arange(24.0).reshape(1, 2, 4, 3)
    found = replay.rows_of(full, torch.empty(shape), first)
    assert found is None if cut is None else torch.equal(found, cut(full))


def test_bits_equal_tells_zero_from_minus_zero_and_refuses_what_cannot_be_compared():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([float("nan")])
    assert agreement.bits_equal(zero, -zero).tolist() == [False, False]
    assert agreement.bits_equal(zero, zero.clone()).all()
    assert agreement.bits_equal(nan, nan.clone()).all()
    with pytest.raises(ValueError, match="cannot equal"):
        agreement.bits_equal(zero, zero.half())
