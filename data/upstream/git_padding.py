"""GIT, text alone: with a cache, left padding is no longer masked."""

import torch
import transformers
from transformers import GitConfig, GitForCausalLM

torch.manual_seed(0)
vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
sizes = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = GitConfig(**sizes, vision_config=vision, bos_token_id=1, eos_token_id=2, initializer_range=0.1)
model = GitForCausalLM(config).double().eval()
ids = torch.randint(3, 320, (1, 12))
ids[:, :3] = 0
mask = (ids != 0).long()
positions = (mask.cumsum(-1) - 1).clamp(min=0)
for image in (None, torch.randn(1, 3, 32, 32, dtype=torch.float64)):
    with torch.inference_mode():
        first = {"pixel_values": image, "position_ids": positions[:, :-1], "attention_mask": mask[:, :-1]}
        cache = model(ids[:, :-1], **first, use_cache=True).past_key_values
        last = model(ids[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], past_key_values=cache).logits
        first |= {"position_ids": positions, "attention_mask": mask}
        full = model(ids, **first, use_cache=False).logits
    off = (last[:, -1] - full[:, -1]).abs().max() / full[:, -1].std()
    print(transformers.__version__, "text alone" if image is None else "with an image", f"off by {off.item():.1e}")
