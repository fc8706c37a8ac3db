"""Equal bits with a cache and without: run the model inside row_invariant()."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbook.exact import row_invariant

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
ids = tokenizer("The capital of France is Paris, and that of Italy is", return_tensors="pt").input_ids


@torch.inference_mode()
def equal_bits() -> bool:
    """Hold the last token's logits on top of a cache against those of one full pass."""
    full = model(ids, use_cache=False).logits[0, -1]
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    return torch.equal(model(ids[:, -1:], past_key_values=cache).logits[0, -1], full)


print(f"stock: bitwise identical: {equal_bits()}")
with row_invariant():
    print(f"row-invariant: bitwise identical: {equal_bits()}")
