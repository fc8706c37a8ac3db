"""Zamba2: a text's time steps are held to time_step_min, a single token's are not."""

import torch
import transformers
from transformers import Zamba2Config, Zamba2ForCausalLM

torch.manual_seed(0)
config = Zamba2Config(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, n_mamba_heads=4,
    mamba_d_state=8, adapter_rank=8, layers_block_type=["linear_attention", "hybrid"] * 2, initializer_range=0.1,
)
model = Zamba2ForCausalLM(config).double().eval()
ids = torch.randint(3, 320, (1, 12))
for limit in (model.model.layers[0].mamba.time_step_limit, (0.0, float("inf"))):
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = limit
            module.dt_bias.data.fill_(-7.0)  # softplus(-7) is 0.0009, a little below time_step_min
    with torch.inference_mode():
        full = model(ids, use_cache=False).logits[:, -1]
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        last = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    print(transformers.__version__, limit, f"off by {((last - full).abs().max() / full.std()).item():.1e}")
