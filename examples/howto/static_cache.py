"""A static cache and torch.compile: room for prompt and answer, steps of one shape, an untimed warm-up."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
ids = tokenizer("My favourite place is", return_tensors="pt").input_ids
new = 24


@torch.inference_mode()
def decode(step, cache):
    """Write tokens with the prompt in one call and each further token in one of fixed shape."""
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    tokens = [token]
    for _ in range(new - 1):
        token = step(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


def room():
    """Make an empty cache for prompt and answer; one that has been used is not empty."""
    return StaticCache(config=model.config, max_cache_len=ids.shape[1] + new)


expected = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)[:, -new:]
compiled = torch.compile(model, dynamic=False)
decode(compiled, room())  # compiles, for a minute or so; time only what follows
for name, step in (("static", model), ("static and compiled", compiled)):
    print(f"{name}: tokens equal those of generate(): {torch.equal(decode(step, room()), expected)}")
