"""A GPT with a cache, written by hand, and four mistakes of such caches: try ``python hand_written_gpt.py``."""

import torch
from torch import nn
from torch.nn import functional

import kvbook


class Rotary(nn.Module):
    """Turns queries or keys by their positions."""

    def forward(self, x, positions):
        half = x.shape[-1] // 2
        angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )


class Attention(nn.Module):
    """Sees the last `window` tokens. `mistake` breaks its cache in one of four ways."""

    def __init__(self, width, heads, window, mistake):
        super().__init__()
        self.heads, self.window, self.mistake = heads, window, mistake
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rotary = Rotary()

    def forward(self, x, past):
        n = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # How many tokens came before these, and how many of them the cache still holds.
        start, held = (0, 0) if past is None else (past[2], past[0].shape[2])
        new = torch.arange(n) + (0 if self.mistake == "positions restart" else start)
        q = self.rotary(q, new)
        if self.mistake == "cached before rotation":
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            kept = k
            # Only the new tokens' positions are at hand, so the cached keys are turned by wrong ones.
            k = self.rotary(k, torch.arange(k.shape[2]) + start)
        else:
            k = self.rotary(k, new)
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            kept = k
        rows, columns = torch.arange(n)[:, None] + held, torch.arange(held + n)
        if self.mistake == "mask not extended" and n > 1:
            rows = torch.arange(n)[:, None]
        mask = (columns <= rows) & (columns > rows - self.window)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        # One token fewer than the window is needed by the next one; the mistake keeps half of that.
        keep = self.window // 2 if self.mistake == "window cropped too short" else self.window
        state = kept[:, :, -keep:], v[:, :, -keep:], start + n
        return self.out(y.transpose(1, 2).flatten(2)), state


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual."""

    def __init__(self, width, *options):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, *options)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, past):
        y, state = self.attention(self.norm1(x), past)
        x = x + y
        return x + self.mlp(self.norm2(x)), state


class GPT(nn.Module):
    """Takes ids and the state of every block, gives logits and the new state."""

    def __init__(self, mistake=None, vocabulary=50, width=32, heads=4, layers=2, window=8):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, window, mistake) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids, state=None):
        x, states = self.embedding(ids), []
        for block, past in zip(self.blocks, state or [None] * len(self.blocks), strict=True):
            x, new = block(x, past)
            states.append(new)
        return self.head(self.norm(x)), states


MISTAKES = ("positions restart", "mask not extended", "cached before rotation", "window cropped too short")

if __name__ == "__main__":
    for mistake in (None, *MISTAKES):
        model = GPT(mistake)
        print(f"\n{mistake or 'no mistake'}")
        print(kvbook.check_step(model, list(range(20)), modules=model))
