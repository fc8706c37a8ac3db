"""Mamba fed in two chunks: the second one begins with an empty state. One token at a time is right."""

import torch
import transformers
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

sizes = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.1}
ids = torch.randint(3, 320, (1, 12), generator=torch.Generator().manual_seed(0))
for kind, config in ((MambaForCausalLM, MambaConfig(**sizes)), (FalconMambaForCausalLM, FalconMambaConfig(**sizes))):
    torch.manual_seed(0)
    model = kind(config).double().eval()
    with torch.inference_mode():
        full = model(ids, use_cache=False).logits[:, -1]
        for chunks in ([6, 6], [6, *[1] * 6]):
            cache = None
            for part in ids.split(chunks, 1):
                output = model(part, cache_params=cache, use_cache=True)
                cache = output.cache_params
            off = (output.logits[:, -1] - full).abs().max() / full.std()
            print(transformers.__version__, kind.__name__, chunks, f"off by {off.item():.1e}")
