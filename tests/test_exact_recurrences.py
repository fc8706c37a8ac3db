"""Recurrent states: a text read token by token inside the switch, so that a prefill and a step are one formula."""

import importlib
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import LinearAttentionLayer

from kvbook.atlas import columns, configurations
from kvbook.atlas.names import LENGTH
from kvbook.diagnosis.execution_paths import chunks, steps
from kvbook.exact import NotInvariant, recurrences, row_invariant

# One of every recurrence that is known, and what keeps a row of the last token.
KNOWN = ("mamba2", "falcon_h1", "mamba", "zamba", "qwen3_next", "kimi_linear", "minimax", "lfm2", "zaya")
WHOLE_OR_STEPS = ("mamba", "zamba")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KNOWN)
def test_a_prefill_and_single_steps_give_equal_bits(name, dtype):
    fed = columns.look_at(configurations.build(name, dtype))
    ids = configurations.text(LENGTH)
    with torch.inference_mode(), row_invariant():
        whole = fed.full(ids)
        assert torch.equal(fed.in_parts(ids, steps(LENGTH))[0], whole)
        if name not in WHOLE_OR_STEPS:
            assert torch.equal(fed.in_parts(ids, chunks(LENGTH))[0], whole)
        assert torch.equal(fed.in_batch(ids), whole)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "minimax"])
def test_control_with_scans_left_as_they_are_the_same_comparison_fails(name, monkeypatch):
    monkeypatch.setattr(recurrences, "_SCANS", {})
    monkeypatch.setattr(recurrences, "_WRAPPED", {})
    monkeypatch.setattr(recurrences, "_guarded", lambda stock: stock)
    fed = columns.look_at(configurations.build(name))
    ids = configurations.text(LENGTH)
    with torch.inference_mode(), row_invariant():
        try:
            found = torch.equal(fed.in_parts(ids, steps(LENGTH))[0], fed.full(ids))
        except NotInvariant:
            # What a scan in chunks is made of, such as a triangular solution, is not known either.
            found = False
    assert not found


def test_a_text_on_top_of_a_state_that_transformers_leaves_out_is_refused():
    fed = columns.look_at(configurations.build("mamba"))
    with torch.inference_mode(), row_invariant(), pytest.raises(NotInvariant, match="mamba_selective_scan"):
        fed.in_parts(configurations.text(12), [6, 6])


def test_a_state_from_an_unknown_formula_is_refused():
    layer = LinearAttentionLayer()
    with row_invariant(), pytest.raises(NotInvariant, match="recurrent state"):
        layer.update_recurrent_state(torch.ones(1, 2, 3))
    assert layer.update_recurrent_state(torch.ones(1, 2, 3)).sum() == 6, "restored"


def test_a_class_whose_text_goes_through_another_formula_is_refused_by_name():
    model = configurations.build("xlstm")
    with torch.inference_mode(), row_invariant(), pytest.raises(NotInvariant, match="xLSTMModel"):
        model(configurations.text(6))


def test_time_steps_that_only_a_text_is_held_to_are_refused():
    model = configurations.build("mamba2")
    for layer in model.backbone.layers:
        layer.mixer.time_step_limit = (0.01, 0.1)
    with torch.inference_mode(), row_invariant(), pytest.raises(NotInvariant, match="time_step_limit"):
        model(configurations.text(6))


def test_everything_is_as_it_was_afterwards():
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    stock = modeling_mamba2.mamba2_chunk_scan, MiniMaxLightningAttention.forward
    with row_invariant():
        assert modeling_mamba2.mamba2_chunk_scan is not stock[0]
        assert MiniMaxLightningAttention.forward is not stock[1]
    assert (modeling_mamba2.mamba2_chunk_scan, MiniMaxLightningAttention.forward) == stock


def test_the_loop_of_steps_is_the_scan_but_for_rounding():
    for name in ("mamba2", "mamba", "qwen3_next", "kimi_linear", "minimax"):
        model, ids = configurations.build(name), configurations.text(LENGTH)
        with torch.inference_mode():
            stock = model(ids, use_cache=False).logits
            with row_invariant():
                assert torch.allclose(model(ids, use_cache=False).logits, stock, atol=1e-4), name


def test_a_model_without_a_state_is_not_touched():
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model, ids = LlamaForCausalLM(config).eval(), configurations.text(5)
    stock = LlamaForCausalLM.forward
    with torch.inference_mode(), row_invariant():
        model(ids)
        assert LlamaForCausalLM.forward is stock


def imported_anew(name, monkeypatch):
    """Forget a module of transformers until the test ends, and import it again."""
    package = importlib.import_module(f"transformers.models.{name}")
    path = f"{package.__name__}.modeling_{name}"
    monkeypatch.setattr(package, f"modeling_{name}", importlib.import_module(path))
    monkeypatch.delitem(sys.modules, path)
    return importlib.import_module(path)


def steps_equal_the_text(module, name, kind):
    torch.manual_seed(0)
    fed = columns.look_at(getattr(module, kind)(configurations.configuration(name)).eval())
    ids = configurations.text(LENGTH)
    return torch.equal(fed.in_parts(ids, steps(LENGTH))[0], fed.full(ids))


@pytest.mark.parametrize(("name", "kind"), [("mamba2", "Mamba2ForCausalLM"), ("minimax", "MiniMaxForCausalLM")])
def test_a_class_imported_inside_the_switch_is_replaced_too_and_restored(name, kind, monkeypatch):
    with torch.inference_mode(), row_invariant():
        module = imported_anew(name, monkeypatch)
        assert steps_equal_the_text(module, name, kind)
    held = module.mamba2_chunk_scan if name == "mamba2" else module.MiniMaxLightningAttention.forward
    assert held.__module__ == module.__name__ or held.__module__.startswith("transformers."), "restored"
    assert not any(isinstance(finder, recurrences._Replaced) for finder in sys.meta_path)


def test_control_without_watching_imports_such_a_class_is_silently_different(monkeypatch):
    monkeypatch.setattr(recurrences._Replaced, "find_spec", lambda *_: None)
    with torch.inference_mode(), row_invariant():
        module = imported_anew("minimax", monkeypatch)
        assert not steps_equal_the_text(module, "minimax", "MiniMaxForCausalLM")


def test_what_a_module_took_from_a_replaced_one_inside_the_switch_is_restored():
    from transformers.models.mamba2 import modeling_mamba2

    stock = modeling_mamba2.mamba2_chunk_scan
    with row_invariant():
        borrowed = type(sys)("transformers.models.own.modeling_own")
        borrowed.mamba2_chunk_scan = modeling_mamba2.mamba2_chunk_scan
        borrowed.mamba2_selective_state_update = modeling_mamba2.mamba2_selective_state_update
        next(each for each in sys.meta_path if isinstance(each, recurrences._Replaced)).put_into(borrowed)
        assert borrowed.mamba2_chunk_scan is not stock
    assert borrowed.mamba2_chunk_scan is stock
    assert modeling_mamba2.mamba2_chunk_scan is stock


def test_a_refused_class_imported_inside_the_switch_is_refused(monkeypatch):
    with torch.inference_mode(), row_invariant():
        module = imported_anew("xlstm", monkeypatch)
        model = module.xLSTMForCausalLM(configurations.configuration("xlstm")).eval()
        with pytest.raises(NotInvariant, match="xLSTMModel"):
            model(configurations.text(6))
