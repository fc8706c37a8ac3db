"""Past a window that you set yourself: crop does not move positions, so refill the cache with the last tokens."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
window, keep, new = 32, 16, 48


@torch.inference_mode()
def write(ids):
    """Write tokens, and begin a new cache whenever the old one is full."""
    cache, fed = None, ids
    for _ in range(new):
        if cache is not None and cache.get_seq_length() == window:
            # The kept tokens are read anew, from position 0: their old keys hold positions and tokens that are gone.
            cache, fed = None, ids[:, -keep:]
        out = model(fed, past_key_values=cache, use_cache=True)
        cache, fed = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, fed], dim=1)
    return ids, cache.get_seq_length()


@torch.inference_mode()
def write_uncached(ids):
    """Write what the same window gives without a cache."""
    held = ids.shape[1]
    for _ in range(new):
        held = keep + 1 if held > window else held + 1
        ids = torch.cat([ids, model(ids[:, -(held - 1) :], use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


ids = tokenizer("My favourite place is", return_tensors="pt").input_ids
refilled, held = write(ids)
print(f"{held} positions held at the end, of {window} at most")
print(f"tokens equal those of the uncached loop: {torch.equal(refilled, write_uncached(ids))}")
