"""How many bytes a cache takes: two tensors a layer, a row of each for every token and every text of a batch."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
ids = tokenizer("The capital of France is Paris, and that of Italy is", return_tensors="pt").input_ids
with torch.no_grad():
    cache = model(ids, use_cache=True).past_key_values

config, n_texts, n_tokens = model.config, *ids.shape
heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
predicted = 2 * config.num_hidden_layers * heads * size * n_tokens * n_texts * model.dtype.itemsize
held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
print(f"a token takes {predicted // n_tokens:,} bytes; what is predicted is what is held: {predicted == held}")
