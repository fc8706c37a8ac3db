"""GPT-Neo with a static cache: the mask is cut at the cache's length, and `generate` writes other tokens."""

import torch
import transformers
from transformers import GPTNeoConfig, GPTNeoForCausalLM, StaticCache

torch.manual_seed(0)
sizes = {"vocab_size": 320, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128}
config = GPTNeoConfig(
    **sizes,
    attention_types=[[["global", "local"], 1]],
    window_size=8,
    initializer_range=0.1,
    bos_token_id=1,
    eos_token_id=2,
)
model = GPTNeoForCausalLM(config).double().eval()
ids = torch.randint(3, 320, (1, 24))
with torch.inference_mode():
    full = model(ids, use_cache=False).logits
    for room in (24, 25, 31):
        cache = StaticCache(config=config, max_cache_len=room)
        found = model(ids, past_key_values=cache, use_cache=True).logits
        off = (found - full).abs().max() / full.std()
        print(transformers.__version__, f"a static cache of {room} for 24 tokens: off by {off.item():.1e}")
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    for name in ("dynamic", "static"):
        written = model.generate(ids, cache_implementation=name, **options)[0, 24:].tolist()
        print(transformers.__version__, f"generate, {name} cache:", written)
