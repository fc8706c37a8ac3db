"""Bamba with a cache and no position_ids: rotary positions begin at 0 again on every call."""

import torch
import transformers
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
config = BambaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, mamba_d_head=32,
    num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_state=8, mamba_expand=2,
    initializer_range=0.1,
)
model = BambaForCausalLM(config).double().eval()
ids = torch.randint(3, 320, (1, 12))
with torch.inference_mode():
    full = model(ids, use_cache=False).logits[:, -1]
    for given in ({}, {"position_ids": torch.tensor([[11]])}):
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        last = model(ids[:, -1:], past_key_values=cache, **given).logits[:, -1]
        print(transformers.__version__, list(given), f"off by {((last - full).abs().max() / full.std()).item():.1e}")
