"""Predicted bytes of keys and values are those that a cache then holds, in every family."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvbook.measuring import memory
from kvbook.models import standins

CAUSAL = [family for family in standins.FAMILIES if family != "roberta"]


@pytest.mark.parametrize("family", CAUSAL)
def test_a_cache_holds_the_bytes_that_the_shape_predicts(family, family_folders, ids):
    model = AutoModelForCausalLM.from_pretrained(family_folders[family]).eval()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids, past_key_values=cache, use_cache=True)
    predicted = memory.kv_bytes_per_token(model.config, torch.float32)
    assert memory.cache_bytes(cache) == predicted * ids.shape[1]


def test_control_heads_of_queries_are_not_heads_of_keys(family_folders):
    config = AutoConfig.from_pretrained(family_folders["falcon"])
    assert memory.kv_heads(config) == 1 < config.num_attention_heads
