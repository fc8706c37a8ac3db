"""Models small enough to be made on the spot, and a check's questions to them."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from kvbook import paths
from kvbook.diagnosis import CheckSettings
from kvreport.chapters.from_scratch.gpt.checkpoints import Recipe

SMALL = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 2}
LLAMAS = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def drawn(seed: int, config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def small_llama(**changes: int) -> transformers.LlamaForCausalLM:
    sizes = LLAMAS | {"num_hidden_layers": 6} | changes
    return drawn(1, transformers.LlamaConfig(**SMALL, **sizes, max_position_embeddings=64))


def small_gpt2() -> transformers.GPT2LMHeadModel:
    sizes = {"n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    return drawn(2, transformers.GPT2Config(**SMALL, **sizes))


def small_mistral() -> transformers.MistralForCausalLM:
    """Build a model whose window is longer than the texts that every check reads."""
    sizes = {"num_hidden_layers": 2, "sliding_window": 32, "max_position_embeddings": 128}
    return drawn(3, transformers.MistralConfig(**SMALL, **LLAMAS, **sizes))


# What a reader's checkpoint may be.
PLAIN, PLAIN_TOO, MIXTURE, NO_PAD = "llama", "falcon", "mixture", "no pad token"


def checkpoint(kind: str, to: Path) -> str:
    """Return the folder of a small checkpoint: a trained one, one of experts, or one without a pad token."""
    standins = paths.DATA / "models" / "standins"
    if kind in (PLAIN, PLAIN_TOO):
        return str(standins / kind)
    trained = standins / PLAIN
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    model = transformers.AutoModelForCausalLM.from_pretrained(trained)
    if kind == MIXTURE:
        ids = {name: getattr(model.config, name) for name in SMALL}
        sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "max_position_embeddings": 512}
        model = drawn(0, transformers.MixtralConfig(**ids, **LLAMAS, **sizes))
    else:
        tokenizer.pad_token = model.config.pad_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return str(to)


def configure(folder: Path, **changes) -> None:
    """Change a checkpoint's configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def lose_a_weight(folder: Path) -> None:
    """Take one matrix out of the second layer of a checkpoint of Llama's build."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def asked(model, texts, **changes) -> CheckSettings:
    """Return the settings of a check of two short texts."""
    given = {"model": str(model), "corpus": str(texts), "n_samples": 2, "n_tokens": 12} | changes
    return CheckSettings.checked(**given)


def generated(model, ids: torch.Tensor, n: int, **options):
    """Let transformers write so many tokens greedily after a prompt, with all that it returns."""
    asked = {"attention_mask": torch.ones_like(ids), "min_new_tokens": n} | options
    return model.generate(ids, do_sample=False, max_new_tokens=n, return_dict_in_generate=True, **asked)


# A training of the model from scratch that takes a second.
SCRATCH = Recipe(layers=2, width=16, heads=2, block=16, steps=8, batch_size=4, rate=1e-3, falls=True, dropout=0.1)
