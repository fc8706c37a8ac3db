"""Models small enough to be made on the spot, and a check's questions to them."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from kvbook.diagnosis.settings import CheckSettings

SMALL = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 2}


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def small_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(2)
    config = GPT2Config(**SMALL, n_embd=32, n_layer=6, n_head=4, n_positions=64, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def asked(model, texts, **changes) -> CheckSettings:
    """Give the settings of a check of two short texts."""
    given = {"model": str(model), "corpus": str(texts), "n_samples": 2, "n_tokens": 12} | changes
    return CheckSettings.checked(**given)
