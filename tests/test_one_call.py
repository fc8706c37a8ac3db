"""A decode step in one call: it writes the stock model's tokens, and refuses a model that it is not written for."""

from types import SimpleNamespace

import pytest
import torch
from refusing import refusal
from small_models import LLAMAS, SMALL, drawn
from transformers import LlamaConfig, Qwen2Config

from kvbook import native
from kvbook.measuring import one_call
from kvbook.runs import threads
from kvreport.chapters.static_cache import StaticCacheSettings
from kvreport.chapters.static_cache import one_call as beside

# Heads that share keys or do not, a width that threads share unevenly, a vocabulary of an odd size, tied embeddings.
SHAPES = {
    "grouped": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "ungrouped": {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 301},
    "tied": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "tie_word_embeddings": True},
    "scaled angles": {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
}


def build(dtype=torch.bfloat16, **shape):
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    model = drawn(0, LlamaConfig(**SMALL | sizes | heads | shape)).to(dtype)
    # Random weights of the usual size leave every logit near the others, and rounding then picks the token.
    for each in model.parameters():
        each.mul_(6 if each.ndim == 2 else 1)
    return model


def share_of_equal(model, count=24):
    ids = torch.arange(7, 19)[None]
    with torch.inference_mode():
        decoder = one_call.OneCall(model, ids.shape[1] + count)
        ours = [decoder.start(ids)]
        while len(ours) < count:
            ours.append(decoder.step(ours[-1]))
        # Fed what ours wrote, so that one near-tie does not change all that follows.
        logits = model(torch.cat([ids, torch.tensor([ours])], 1)).logits[0, ids.shape[1] - 1 : -1]
    return (logits.argmax(-1) == torch.tensor(ours)).float().mean().item()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_writes_the_stock_models_tokens(shape, count):
    with threads.using(count):
        assert share_of_equal(build(**SHAPES[shape])) >= 0.9


def test_it_leaves_numbers_below_the_smallest_normal_one_as_they_are():
    share_of_equal(build(), 4)
    assert (torch.tensor([1e-40]) * 0.5).item() > 0


def test_control_a_wrong_scale_of_attention_writes_other_tokens(monkeypatch):
    model = build(**SHAPES["grouped"])
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.mul_(4)
    assert share_of_equal(model) >= 0.9

    class Halved(one_call._Model):
        def __init__(self, *about):
            super().__init__(*about)
            self.scale /= 4

    monkeypatch.setattr(one_call, "_Model", Halved)
    assert share_of_equal(model) < 0.9


@pytest.mark.parametrize("make", [
    lambda: drawn(0, Qwen2Config(**SMALL, **LLAMAS, num_hidden_layers=1)).bfloat16(),
    lambda: build(torch.float32), lambda: build(attention_bias=True), lambda: build(hidden_act="gelu"),
    lambda: build(hidden_size=40, num_attention_heads=5),
])
def test_a_model_that_it_is_not_written_for_is_refused(make):
    assert "models of Llama's build in bf16" in refusal(lambda: one_call.OneCall(make(), 8))


def test_without_a_compiler_it_is_refused_and_the_experiment_left_out(monkeypatch):
    assert beside.inputs(StaticCacheSettings())
    monkeypatch.setenv("CXX", "")
    assert "takes a compiler" in refusal(lambda: one_call.OneCall(build(), 8))
    assert beside.inputs(StaticCacheSettings()) is None
    assert native.compiler() is None


def test_the_experiment_times_all_programs_by_turns_and_memory_between_them(monkeypatch, tmp_path):
    model, written = build(), []

    graphs = SimpleNamespace(start=lambda _: 5, step=lambda _: 5, close=lambda: None)
    monkeypatch.setattr(beside.decoding, "Decoder", lambda *_: graphs)
    monkeypatch.setattr(beside.step_times, "_N", 1 << 12)
    monkeypatch.setattr(beside.subject, "load", lambda _: SimpleNamespace(model=model, about={}))
    monkeypatch.setattr(beside.subject, "prompt", lambda *_: torch.arange(7, 19)[None])
    settings = StaticCacheSettings.checked(n_new_tokens=6, n_repeats=2)
    beside.measure(settings, {}, SimpleNamespace(done=set(), keep=lambda _, about, rows: written.extend(rows)))
    assert [row["program"] for row in written] == 2 * ["memory", "one-row step", "one call", "generate"]
    assert {tuple(row) for row in written} == {tuple(written[0])}
    assert all(row["step_s"] > 0 for row in written)
    assert {row["equal"] for row in written if row["program"] == "one-row step"} == {6}


def test_a_full_cache_is_refused():
    model, ids = build(), torch.arange(7, 11)[None]
    with torch.inference_mode():
        decoder = one_call.OneCall(model, 5)
        token = decoder.step(decoder.start(ids))
        with pytest.raises(ValueError, match="room for 5 tokens"):
            decoder.step(token)
