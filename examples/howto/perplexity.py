"""Perplexity with a cache: feed chunks, keep the cache, and score each chunk's first token from the chunk before."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
ids = tokenizer(torch.nn.functional.cross_entropy.__doc__, return_tensors="pt").input_ids[:, :256]


def loss(chunk: int) -> float:
    """Score the text in chunks on one cache."""
    cache, logits = None, []
    with torch.inference_mode():
        for piece in ids.split(chunk, dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
    # Joined first: the last logits of a chunk predict the first token of the next one.
    predicted = torch.cat(logits, dim=1)[0, :-1]
    return torch.nn.functional.cross_entropy(predicted.double(), ids[0, 1:]).item()


whole = loss(ids.shape[1])
for chunk in (64, 16, 1):
    print(f"chunks of {chunk}: perplexity equal within 0.01 %: {abs(loss(chunk) - whole) < 1e-4}")
