"""Recurrent states: a text read token by token inside the switch, so that a prefill and a step are one formula."""

import contextlib
import importlib
import sys

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from kvbook.atlas import SHORT, columns, configurations
from kvbook.diagnosis.execution_paths import chunks, steps
from kvbook.exact import NotInvariant, recurrences, row_invariant

# One of every recurrence that is known, and what keeps a row of the last token.
KNOWN = ("mamba2", "falcon_h1", "mamba", "zamba", "qwen3_next", "kimi_linear", "minimax", "lfm2", "zaya")
IDS = configurations.text(SHORT)


def steps_equal_the_text(model) -> bool:
    fed = columns.look_at(model)
    return torch.equal(fed.in_parts(IDS, steps(SHORT))[0], fed.full(IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KNOWN)
def test_a_prefill_and_single_steps_give_equal_bits_and_stocks_result_but_for_rounding(name, dtype):
    fed = columns.look_at(configurations.build(name, dtype))
    with torch.inference_mode():
        stock = fed.full(IDS)
        with row_invariant():
            whole = fed.full(IDS)
            assert torch.equal(fed.in_parts(IDS, steps(SHORT))[0], whole)
            if name not in ("mamba", "zamba"):
                assert torch.equal(fed.in_parts(IDS, chunks(SHORT))[0], whole)
            assert torch.equal(fed.in_batch(IDS), whole)
    if dtype == torch.float32:
        assert torch.allclose(whole, stock, atol=1e-4)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "minimax"])
def test_control_with_scans_left_as_they_are_the_same_comparison_fails(name, monkeypatch):
    monkeypatch.setattr(recurrences, "_SCANS", {})
    monkeypatch.setattr(recurrences, "_WRAPPED", {})
    monkeypatch.setattr(recurrences, "_guarded", lambda stock, *given, **more: stock(*given, **more))
    # What a scan in chunks is made of, such as a triangular solution, is not known either.
    with torch.inference_mode(), row_invariant(), contextlib.suppress(NotInvariant):
        assert not steps_equal_the_text(configurations.build(name))


def limited_steps():
    model = configurations.build("mamba2")
    for layer in model.backbone.layers:
        layer.mixer.time_step_limit = (0.01, 0.1)
    return model


REFUSED = {
    # Of a state that transformers leaves out.
    "mamba_selective_scan": lambda: columns.look_at(configurations.build("mamba")).in_parts(IDS[:, :12], [6, 6]),
    "recurrent state": lambda: LinearAttentionLayer().update_recurrent_state(torch.ones(1, 2, 3)),
    "xLSTMModel": lambda: configurations.build("xlstm")(IDS),
    "time_step_limit": lambda: limited_steps()(IDS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_known_formula_is_refused_by_name(name):
    with torch.inference_mode(), row_invariant(), pytest.raises(NotInvariant, match=name):
        REFUSED[name]()


def test_everything_is_as_it_was_afterwards_also_what_a_module_took_from_a_replaced_one():
    def held():
        return modeling_mamba2.mamba2_chunk_scan, MiniMaxLightningAttention.forward

    stock = held()
    with row_invariant():
        assert not any(one is other for one, other in zip(stock, held(), strict=True))
        borrowed = type(sys)("transformers.models.own.modeling_own")
        borrowed.mamba2_chunk_scan = modeling_mamba2.mamba2_chunk_scan
        borrowed.mamba2_selective_state_update = modeling_mamba2.mamba2_selective_state_update
        next(each for each in sys.meta_path if isinstance(each, recurrences._Replaced)).put_into(borrowed)
    assert held() == stock
    assert borrowed.mamba2_chunk_scan is stock[0]
    assert LinearAttentionLayer().update_recurrent_state(torch.ones(1, 2, 3)).sum() == 6


def imported_anew(name, monkeypatch):
    """Forget a module of transformers until the test ends, and import it again."""
    package = importlib.import_module(f"transformers.models.{name}")
    path = f"{package.__name__}.modeling_{name}"
    monkeypatch.setattr(package, f"modeling_{name}", importlib.import_module(path))
    monkeypatch.delitem(sys.modules, path)
    return importlib.import_module(path)


def built(module, name, kind):
    torch.manual_seed(0)
    return getattr(module, kind)(configurations.configuration(name)).eval()


@pytest.mark.parametrize(("name", "kind"), [("mamba2", "Mamba2ForCausalLM"), ("minimax", "MiniMaxForCausalLM")])
def test_a_class_imported_inside_the_switch_is_replaced_too_and_restored(name, kind, monkeypatch):
    with torch.inference_mode(), row_invariant():
        module = imported_anew(name, monkeypatch)
        assert steps_equal_the_text(built(module, name, kind))
    held = module.mamba2_chunk_scan if name == "mamba2" else module.MiniMaxLightningAttention.forward
    assert held.__module__.startswith("transformers."), "restored"
    assert not any(isinstance(finder, recurrences._Replaced) for finder in sys.meta_path)


def test_control_without_watching_imports_such_a_class_is_silently_different(monkeypatch):
    monkeypatch.setattr(recurrences._Replaced, "find_spec", lambda *_: None)
    with torch.inference_mode(), row_invariant():
        assert not steps_equal_the_text(built(imported_anew("minimax", monkeypatch), "minimax", "MiniMaxForCausalLM"))
