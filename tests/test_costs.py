"""What a run costs, predicted: operations, time, and the bytes of models and caches."""

import pandas as pd
import pytest
import torch
from refusing import refusal
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from kvbook import paths
from kvbook.measuring import costs, memory
from kvbook.models import loading, standins


@pytest.mark.parametrize("family", ["llama", "gpt2", "smollm2", "falcon"])
def test_operations_are_those_that_torch_counts_of_each_token_each_pair_of_them_and_a_head_that_is_tied(
    family, family_folders
):
    # Of a fused attention torch counts nothing.
    model = loading.load(str(family_folders[family]), attention="eager").model
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.arange(200)[None])
    # Biases and norms are counted with the matrices; a sum goes with each multiplication.
    assert costs.operations(model.config, 200) == pytest.approx(counter.get_total_flops() / 2, rel=0.02)


def test_time_grows_with_passes_and_dtypes_and_memory_with_the_widest_dtype(llama, monkeypatch):
    monkeypatch.setattr(costs, "pass_seconds", lambda config, dtype, n_tokens, device: float(n_tokens))
    one = costs.predict(llama.config, ["float32"], 10, n_passes=1)
    three = costs.predict(llama.config, ["float32", "bfloat16", "float64"], 10, n_passes=2, n_steps=5)
    assert (one.seconds, three.seconds) == (10, 3 * (2 * 10 + 5))
    weights = sum(parameter.numel() for parameter in llama.parameters())
    assert three.n_bytes - one.n_bytes == pytest.approx(4 * weights, rel=0.2)
    assert costs.Cost(2.44e9, 61).line() == "about 2.4 GB and 2 min"


def test_a_pass_is_predicted_to_take_some_time_and_a_missing_device_is_one_line(llama):
    assert costs.pass_seconds(llama.config, torch.float32, 8, torch.device("cpu")) > 0
    assert "CUDA devices" in refusal(costs.predict, llama.config, ["float32"], 8, n_passes=1, device="cuda:99")


def test_recorded_checks_of_large_models_kept_within_their_memory_layer_by_layer():
    made = pd.read_csv(paths.DATA / "check" / "large.csv")
    # MPT's configuration switches the cache off, so no past comes back.
    assert ((made["verdict"] == "bug") == made["model"].str.contains("mpt")).all()
    assert set(made["verdict"]) == {"bug", "rounding"}
    assert made["by_layers"].all()
    assert made.query("peak_gb >= 1.15 * predicted_gb").empty


@pytest.mark.parametrize("family", [family for family in standins.FAMILIES if family != "roberta"])
def test_a_cache_holds_the_bytes_that_the_shape_predicts(family, family_folders, ids):
    model = loading.load(str(family_folders[family])).model
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids, past_key_values=cache, use_cache=True)
    assert memory.cache_bytes(cache) == memory.kv_bytes_per_token(model.config, torch.float32) * ids.shape[1]
