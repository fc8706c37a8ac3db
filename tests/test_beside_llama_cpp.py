"""The comparison with llama.cpp: it reads the model's own weights, and is made on demand alone."""

import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pandas as pd
import pytest
import torch

from kvbook.errors import UserError
from kvbook.models import loading
from kvbook.runs import records
from kvreport.chapters.static_cache import beside_llama_cpp
from kvreport.chapters.static_cache.settings import BesideLlamaCppSettings, StaticCacheSettings
from kvreport.engines import gguf_file


@pytest.fixture(scope="module")
def model():
    return loading.load("llama", dtype="bfloat16").model


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """What stands in the file: by name, as numbers of fp32."""
    file = gguf_file.write_gguf(model, tmp_path_factory.mktemp("gguf") / "model.gguf")
    tensors = gguf.GGUFReader(file).tensors
    return {one.name: torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy()) for one in tensors}


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the rows of each head, of which llama.cpp turns neighbours, back into two halves."""
    return torch.cat([torch.cat([head[0::2], head[1::2]]) for head in weight.chunk(heads)])


def test_every_weight_is_written_and_no_other_number(model, written):
    state, config = model.state_dict(), model.config
    for layer in range(config.num_hidden_layers):
        of, to = f"model.layers.{layer}.", f"blk.{layer}."
        for ours, theirs, heads in (("q", "q", config.num_attention_heads), ("k", "k", config.num_key_value_heads)):
            weight = state[f"{of}self_attn.{ours}_proj.weight"].float()
            assert halves(written[f"{to}attn_{theirs}.weight"], heads).equal(weight)
            # The control: as it stands it is another matrix.
            assert not written[f"{to}attn_{theirs}.weight"].equal(weight)
        assert written[f"{to}ffn_down.weight"].equal(state[f"{of}mlp.down_proj.weight"].float())
        assert written[f"{to}ffn_norm.weight"].equal(state[f"{of}post_attention_layernorm.weight"].float())
    assert written["token_embd.weight"].equal(state["model.embed_tokens.weight"].float())
    assert sum(one.numel() for one in written.values()) == sum(one.numel() for one in model.parameters())
    assert all(np.isfinite(one.numpy()).all() for one in written.values())


def test_the_chapter_does_not_ask_for_it():
    assert beside_llama_cpp.inputs(StaticCacheSettings()) is None


def test_without_llama_cpp_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UserError, match="pip install llama-cpp-python"):
        beside_llama_cpp.inputs(BesideLlamaCppSettings())


@pytest.mark.parametrize("same", [True, False])
def test_a_program_that_begins_with_another_token_is_not_compared(monkeypatch, tmp_path, same):
    writer = records.Writer(tmp_path)
    library = SimpleNamespace()
    theirs = ([0.002] * 6, [7 if same else 8] * 6)
    monkeypatch.setattr(
        beside_llama_cpp, "steps_of", lambda decoder, *_: theirs if decoder is library else ([0.001] * 6, [7] * 6)
    )
    monkeypatch.setattr(beside_llama_cpp, "_LlamaCpp", lambda *_: library)
    settings = BesideLlamaCppSettings(model="llama", weights="stand-in", n_new_tokens=6, n_repeats=2)
    if not same:
        with pytest.raises(UserError, match="another token"):
            beside_llama_cpp.measure(settings, {}, writer)
        return
    beside_llama_cpp.measure(settings, {}, writer)
    rows = pd.read_csv(tmp_path / "rows.csv")
    found = rows.pivot(index="repeat", columns="program", values="step_s")
    assert found.to_numpy() == pytest.approx(np.array([[0.002, 0.001]] * 2))
