"""Llama's equations in a few lines of fp64, over the bytes of a GGUF file: nothing of transformers, nothing of ours.

In the file, rows of queries and keys stand so that each pair that a position turns is two neighbours; transformers
keeps such pairs half a head apart.  Agreement therefore says that the reader's reordering is right too.
"""

import numpy as np
import torch
from gguf import GGUFReader
from torch.nn import functional


def _halves(blocks, start):
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float64)


def numbers(tensor) -> torch.Tensor:
    """Unpack a tensor by llama.cpp's own description of its blocks."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind = tensor.tensor_type.name
    if kind == "F32":
        return torch.from_numpy(np.array(tensor.data, dtype=np.float64)).reshape(shape)
    if kind == "Q8_0":
        blocks = tensor.data.reshape(-1, 2 + 32)
        values = _halves(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    elif kind == "Q4_1":
        blocks = tensor.data.reshape(-1, 2 + 2 + 16)
        packed = blocks[:, 4:]
        values = _halves(blocks, 0) * np.hstack([packed & 15, packed >> 4]) + _halves(blocks, 2)
    else:
        raise AssertionError(kind)
    return torch.from_numpy(values).reshape(shape)


def logits(file, ids, *others: float) -> torch.Tensor:
    """Return the logits of all tokens, and below them those with other bases of positions, for a control."""
    reader = GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    fact = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads, groups = fact["llama.attention.head_count"], fact["llama.attention.head_count_kv"]
    bases = [fact["llama.rope.freq_base"], *others]

    def weight(name):
        return numbers(tensors[f"{name}.weight"])

    def norm(x, name):
        return functional.rms_norm(x, x.shape[-1:], weight(name), fact["llama.attention.layer_norm_rms_epsilon"])

    # A base is a row of a batch: so each weight is unpacked once.
    x = weight("token_embd")[torch.tensor([ids] * len(bases))]
    shape = x.shape[:2]
    n, width = shape[1], x.shape[2] // heads
    powers = -torch.arange(0, width, 2).double() / width
    angles = torch.stack([torch.outer(torch.arange(n).double(), base**powers) for base in bases])
    turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]

    def turned(x):
        pairs = torch.view_as_complex(x.reshape(*shape, -1, width // 2, 2))
        return torch.view_as_real(pairs * turn).reshape(*shape, -1, width)

    hidden_from = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)
    for layer in range(fact["llama.block_count"]):
        h = norm(x, f"blk.{layer}.attn_norm")
        q, k, v = (h @ weight(f"blk.{layer}.attn_{part}").T for part in "qkv")
        q, k, v = turned(q), turned(k), v.reshape(*shape, groups, width)
        k, v = (part.repeat_interleave(heads // groups, dim=2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5 + hidden_from
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(*shape, -1)
        x = x + mixed @ weight(f"blk.{layer}.attn_output").T
        h = norm(x, f"blk.{layer}.ffn_norm")
        gate, up = (h @ weight(f"blk.{layer}.ffn_{part}").T for part in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ weight(f"blk.{layer}.ffn_down").T
    return norm(x, "output_norm") @ weight("output" if "output.weight" in tensors else "token_embd").T
