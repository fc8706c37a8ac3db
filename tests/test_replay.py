"""Equal-input replay: what differs by itself is found and named, and nothing else is."""

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


def build(family: str, attention: str | None = None):
    torch.manual_seed(4)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]), **options)
    return model.eval().requires_grad_(False)


@pytest.fixture(params=CONFIGS)
def model(request):
    return build(request.param)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def test_recording_changes_no_bit_and_the_last_operation_gives_the_logits(model, ids):
    plain = model(ids, use_cache=False).logits
    full, _ = replay.record(model, ids)
    logits = list(full.values())[-1]
    assert (logits.operation, logits.kind) == ("lm_head", "lm head")
    assert agreement.bits_equal(logits.output, plain).all()
    assert agreement.bits_equal(model(ids, use_cache=False).logits, plain).all()


def test_an_identical_replay_is_equal_in_every_operation(model, ids):
    full, cache = replay.record(model, ids)
    again = replay.replay_last(model, ids, full, cache, ids.shape[1])
    assert len(again) == len(full) > 20
    assert all(verdict.differing == 0 and verdict.inputs_equal for verdict in again)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_operation_of_every_layer_is_met_once_with_equal_inputs(model, ids, rows):
    full, cache = replay.record(model, ids)
    verdicts = replay.replay_last(model, ids, full, cache, rows)
    assert [verdict.order for verdict in verdicts] == list(range(len(full)))
    assert all(verdict.inputs_equal for verdict in verdicts)
    linears = {verdict.operation for verdict in verdicts if verdict.kind == "linear"}
    modules = [
        m for name, m in model.named_modules() if ".0." in name and type(m).__name__.endswith(("Linear", "Conv1D"))
    ]
    assert len(linears) == len(modules)


def test_the_first_rows_are_replayed_too_and_only_alibi_is_handed_other_inputs(model, ids):
    full, _ = replay.record(model, ids)
    verdicts = replay.replay_first(model, ids, full, ids.shape[1] - 1)
    unequal = {verdict.operation for verdict in verdicts if not verdict.inputs_equal}
    assert unequal == ({"attn: elementwise"} if model.config.model_type == "mpt" else set())


def test_the_cache_that_was_given_is_left_as_it_was(model, ids):
    full, cache = replay.record(model, ids)
    before = [layer.keys.clone() for layer in cache.layers]
    replay.replay_last(model, ids, full, cache, 1)
    assert all(agreement.bits_equal(a, layer.keys).all() for a, layer in zip(before, cache.layers, strict=True))


def plant(module, wrong) -> None:
    stock = module.forward
    module.forward = types.MethodType(lambda self, x, *rest: wrong(stock(x, *rest), x), module)


def depends_on_rows(output, x):
    # One row is computed a little otherwise than several: what a library does, written so that it does so anywhere.
    return output * (1.01 if x.shape[-2] == 1 else 1.0)


def own(verdicts) -> set[tuple[int | None, str]]:
    return {(v.layer, v.operation) for v in verdicts if v.differing and v.inputs_equal}


@pytest.mark.parametrize("path", ["input_layernorm", "mlp.act_fn", "self_attn.k_proj", "mlp.down_proj"])
def test_a_planted_operation_that_depends_on_the_number_of_rows_is_named_and_no_other_one_is_blamed(ids, path):
    model = build("llama")
    full, cache = replay.record(model, ids)
    # Which operations of the library differ, and at how many rows, is the processor's affair.
    clean = {rows: own(replay.replay_last(model, ids, full, cache, rows)) for rows in (16, 1)}
    plant(model.get_submodule(f"model.layers.1.{path}"), depends_on_rows)
    full, cache = replay.record(model, ids)
    assert own(replay.replay_last(model, ids, full, cache, 16)) == clean[16]
    assert own(replay.replay_last(model, ids, full, cache, 1)) == clean[1] | {(1, path)}


def test_without_correction_a_planted_difference_spreads_to_the_logits(ids):
    model = build("llama").double()
    plant(model.model.layers[0].mlp.act_fn, depends_on_rows)
    full, _ = replay.record(model, ids)
    real = replay.replay_last(model, ids, full, passes.prefill(model, ids[:, :-1]), 1, corrected=False)
    assert real[-1].operation == "lm_head"
    assert real[-1].differing
    assert not real[-1].inputs_equal
    # In double precision what is handed on stands out from rounding by orders of magnitude.
    before = [v.relative_rms for v in real if v.layer == 0 and v.operation.startswith("self_attn")]
    assert real[-1].relative_rms > 1e6 * max(before)


def test_a_planted_dependence_on_what_comes_behind_is_found_in_the_first_rows(ids):
    model = build("gpt2")
    plant(model.transformer.h[1].ln_2, lambda output, x: output * (1.0 if x.shape[-2] == ids.shape[1] else 1.01))
    full, _ = replay.record(model, ids)
    verdicts = replay.replay_first(model, ids, full, ids.shape[1] - 1)
    assert (1, "ln_2") in own(verdicts)


def test_an_operation_that_the_full_pass_does_not_have_is_refused_by_name(ids):
    model = build("llama")
    full, cache = replay.record(model, ids)
    plant(model.model.layers[1].mlp.up_proj, lambda output, x: torch.tanh(output))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp.*tanh has no counterpart"):
        replay.replay_last(model, ids, full, cache, 1)


def test_nothing_is_left_on_the_model_after_an_error(ids):
    model = build("llama")
    plant(model.model.layers[1].mlp.up_proj, lambda output, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replay.record(model, ids)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_rows_are_cut_from_either_end_and_unexplained_shapes_are_refused():
    full = torch.arange(24.0).reshape(1, 2, 4, 3)
    assert torch.equal(replay.rows_of(full, torch.empty(1, 2, 2, 3), first=False), full[..., 2:, :])
    assert torch.equal(replay.rows_of(full, torch.empty(1, 2, 2, 3), first=True), full[..., :2, :])
    assert torch.equal(replay.rows_of(full, torch.empty(1, 4, 4, 3), first=False), full.repeat_interleave(2, 1))
    assert replay.rows_of(full, torch.empty(2, 4, 3), first=False) is None
    assert replay.rows_of(full, torch.empty(1, 2, 5, 3), first=False) is None


def test_bits_equal_tells_zero_from_minus_zero_and_refuses_what_cannot_be_compared():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([float("nan")])
    assert agreement.bits_equal(zero, -zero).tolist() == [False, False]
    assert agreement.bits_equal(zero, zero.clone()).all()
    assert agreement.bits_equal(nan, nan.clone()).all()
    with pytest.raises(ValueError, match="cannot equal"):
        agreement.bits_equal(zero, zero.half())
