"""Moshi beyond its window: the full pass sees every key, the cache keeps the window's."""

import torch
import transformers
from transformers import MoshiConfig, MoshiForCausalLM

torch.manual_seed(0)
config = MoshiConfig(
    vocab_size=320, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, sliding_window=8
)
model = MoshiForCausalLM(config).double().eval()
ids = torch.randint(3, 320, (1, 24))
with torch.inference_mode():
    full = model(ids, use_cache=False).logits
    cache, steps = None, []
    for token in ids.split(1, 1):
        output = model(token, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
off = (torch.cat(steps, 1) - full).abs().amax(-1)[0] / full.std()
print(transformers.__version__, type(cache.layers[0]).__name__, "keys held:", cache.layers[0].keys.shape[2])
for position, value in enumerate(off.tolist()):
    print(f"position {position:2d}: largest difference over the spread of the logits {value:.1e}")
