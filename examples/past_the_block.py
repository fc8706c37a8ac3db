# Given: model
# Its forward takes (idx, cache, held) and returns (logits, cache).
import torch


@torch.no_grad()
def generate(model, idx, max_new_tokens, block_size):
    cache, held = None, 0  # held: how many tokens the cache has
    for _ in range(max_new_tokens):
        idx_cond = idx[:, -1:]  # only the new token
        # Empty or full: refill, later with half a block.
        if held in (0, block_size):
            kept = block_size // 2 if held else block_size
            cache, held, idx_cond = None, 0, idx[:, -kept:]
        # in forward: pos = torch.arange(held, held + t, device=idx.device)
        logits, cache = model(idx_cond, cache, held)
        held += idx_cond.size(1)
        idx = torch.cat((idx, logits[:, -1:].argmax(-1)), dim=1)
    return idx
