"""Reuse a prompt's cache: keep only the ids that both texts share, and never the cache itself."""

import copy
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()

prefix = tokenizer("You answer in one word. The capital of ", return_tensors="pt").input_ids
with torch.inference_mode():
    prompt_cache = model(prefix, past_key_values=DynamicCache(config=model.config)).past_key_values

for rest in ("France is", "Italy is"):
    # Of the whole text: the prefix's last ids may change when more text follows.
    ids = tokenizer("You answer in one word. The capital of " + rest, return_tensors="pt").input_ids
    n = min(prefix.shape[1], ids.shape[1] - 1)  # one token must be left to feed
    keep = int((prefix[0, :n] == ids[0, :n]).long().cumprod(0).sum())
    cache = copy.deepcopy(prompt_cache)  # generate() writes into the cache it is given
    if keep < prefix.shape[1]:
        cache.crop(keep - prefix.shape[1])  # a negative number: how many to drop
    reused = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    fresh = model.generate(ids, max_new_tokens=8, do_sample=False)
    print(f"{rest}: {keep} of {prefix.shape[1]} ids reused, tokens equal: {torch.equal(reused, fresh)}")
