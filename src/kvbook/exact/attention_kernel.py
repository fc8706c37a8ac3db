"""torch's attention kernel, and which of its shapes may be used: those that give the reference's bits.

torch's CPU kernel walks through the keys in blocks of 512 and keeps a running maximum and sum; on a GPU its
memory-efficient kernel does so in blocks of 64 or 128.  Padded to whole blocks and with the mask written out, a block
past a query's last key changes nothing.  What remains is the number of queries and of heads, and a last block that is
not filled up: each is compared bit for bit with the reference, one head and four queries on whole blocks, the first
time that it is wanted.
"""

import functools
import math

import torch

from kvbook.exact import rows
from kvbook.exact.kernels import base, cancel, draw, pairs

BLOCK = 512
# A last block is filled up to a multiple of this many where the bits allow it, so that short texts cost less.
_PART = 128
# Never to fewer than the vectors hold: what is left over at a row's end has an exponential of its own, whose last bit
# differs. To copy keys takes longer than to attend in a decode step, so there as few are tried as can be.
PARTS_OF_A_STEP = (32, _PART, BLOCK)
QUERIES = 4


# torch's kernel by dispatch key; `base` must hold it before the switch refuses it.
KERNELS = {
    "CPU": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "CUDA": "aten::_scaled_dot_product_efficient_attention",
}


def kernel(query, key, value, bias, scale):
    """Run torch's kernel on tensors of shape (1, heads, n, width), and a mask that is added or None."""
    if query.is_cuda:
        efficient = base(KERNELS["CUDA"], "CUDA")
        # It wants a mask for each head, in the queries' dtype; heads may share one in memory.
        bias = bias.to(query.dtype).expand(-1, query.shape[1], -1, -1)
        return efficient(query, key, value, bias, False, 0.0, False, scale=scale)[0]
    return base(KERNELS["CPU"], "CPU")(query, key, value, 0.0, False, attn_mask=bias, scale=scale)[0]


_verdicts: dict[tuple[object, ...], bool] = {}


def allows(like: torch.Tensor, heads: int, queries: int, keys: int, bias_dtype: torch.dtype) -> bool:
    """Tell whether a shape of the kernel gives the reference's bits, by trying it the first time."""
    about = (like.dtype, like.device, like.shape[-1], heads, queries, keys, bias_dtype, torch.get_num_threads())
    if about not in _verdicts:
        _verdicts[about] = _try(like, heads, queries, keys, bias_dtype)
    return _verdicts[about]


# Scores that are left over from sums of zero, see `pairs`, are brought to about this size by a scale. Were they larger,
# a softmax would see a few of the keys only, and a width of 256 in fp16 would pass for what it is not.
_LEFT_OVER = 2.0**-4
# Keys are paired within stretches of this many, and queries see whole stretches, so that their sums of values are zero
# too.
_STRETCH = 32


def _telling(like: torch.Tensor, heads: int, queries: int, keys: int, bias_dtype: torch.dtype):
    """Make queries, keys, values and a mask whose result tells the order of every addition in it; and a scale."""
    width = like.shape[-1]
    q, k = draw((1, heads, queries, width), 1), draw((1, heads, keys, width), 2)
    v = draw((1, heads, keys, width), 3, scale=16)
    cancel(q, k, seed=4)
    first, second = pairs(_STRETCH, 5)
    for start in range(0, keys - _STRETCH + 1, _STRETCH):
        k[:, :, start + second] = k[:, :, start + first]
        v[:, :, start + second] = -v[:, :, start + first]
    # Every query sees another number of keys, from one stretch to all.
    seen = torch.linspace(1, keys // _STRETCH, queries).round().long() * _STRETCH
    bias = torch.zeros(1, 1, queries, keys, dtype=bias_dtype)
    bias.masked_fill_(torch.arange(keys) >= seen[:, None], float("-inf"))
    q, k, v = (x.to(like.dtype) for x in (q, k, v))
    # Of a few scores, and without the products that may be replaced at this moment.
    left = (q[:, :1, :QUERIES, None].float() * k[:, :1, None].float()).sum(-1).std().item() or 1.0
    return *(x.to(like.device) for x in (q, k, v, bias)), seen, 2.0 ** round(math.log2(_LEFT_OVER / left))


def _try(like: torch.Tensor, heads: int, queries: int, keys: int, bias_dtype: torch.dtype) -> bool:
    q, k, v, bias, seen, scale = _telling(like, heads, max(queries, QUERIES), keys, bias_dtype)
    # Fewer queries than the reference has are tried with each of its numbers of keys.
    turns = range(1 if queries >= QUERIES else QUERIES)
    chosen = [(torch.arange(queries) + turn) % q.shape[2] for turn in turns]
    tried = [kernel(q[:, :, some].contiguous(), k, v, bias[:, :, some].contiguous(), scale) for some in chosen]
    whole = -(-keys // BLOCK) * BLOCK
    k, v = (padded(x, 0, keys, whole) for x in (k, v))
    bias = torch.cat([bias, bias.new_full((1, 1, q.shape[2], whole - keys), float("-inf"))], -1)
    for head in {0, heads // 2, heads - 1}:
        one = slice(head, head + 1)
        for start in range(0, q.shape[2], QUERIES):
            four = slice(start, start + QUERIES)
            # No longer than the longest of these queries needs: blocks after it must change nothing.
            needed = -(-int(seen[four].max()) // BLOCK) * BLOCK
            expected = kernel(
                *(rows.lined_up(x) for x in (q[:, one, four], k[:, one, :needed], v[:, one, :needed])),
                bias[:, :, four, :needed].contiguous(), scale,
            )
            for some, found in zip(chosen, tried, strict=True):
                here = (some >= start) & (some < start + QUERIES)
                if not torch.equal(found[:, one][:, :, here], expected[:, :, some[here] - start]):
                    return False
    return True


@functools.cache
def reference_holds(dtype: torch.dtype, device: torch.device, width: int, _threads: int) -> bool:
    """Tell whether the reference treats its four queries alike, whatever lies beside and however many blocks follow."""
    q, k, v, bias, _, scale = _telling(torch.empty(0, width, dtype=dtype, device=device), 1, QUERIES, BLOCK, dtype)
    bias[:] = bias[:, :, 2:3]
    try:
        mixed = kernel(q, k, v, bias, scale)
    except RuntimeError:
        # A GPU for which torch has no such kernel.
        return False
    return _blocks_behind_change_nothing(k) and all(
        torch.equal(kernel(q[:, :, [place] * QUERIES], k, v, bias, scale), mixed[:, :, [place] * QUERIES])
        for place in range(QUERIES)
    )


def _blocks_behind_change_nothing(like: torch.Tensor) -> bool:
    """Tell whether queries that see no more than one block's keys have equal bits on one block and on two."""
    q, k, v, bias, _, scale = _telling(like, 1, QUERIES, 2 * BLOCK, like.dtype)
    seen = torch.tensor([_STRETCH, BLOCK // 2, BLOCK - _STRETCH, BLOCK], device=like.device)
    bias.zero_().masked_fill_(torch.arange(2 * BLOCK, device=like.device) >= seen[:, None], float("-inf"))
    one = kernel(q, *(rows.lined_up(x[:, :, :BLOCK]) for x in (k, v)), bias[..., :BLOCK].contiguous(), scale)
    return torch.equal(kernel(q, k, v, bias, scale), one)


def padded(x: torch.Tensor, start: int, stop: int, length: int) -> torch.Tensor:
    """Copy a stretch of queries, keys or values, shape (1, heads, stop - start, width), and fill it up with zeros."""
    # One operator instead of three: in a decode step each call's own cost counts.
    return torch.constant_pad_nd(x[:, :, start:stop], (0, 0, 0, length - (stop - start)))


@functools.lru_cache(maxsize=256)
def causal_mask(
    start: int, queries: int, size: int, keys: int, length: int, causal: bool, dtype: torch.dtype, device: torch.device
):
    """Write out a mask of shape (1, 1, size, length) for queries that see all keys, or those up to their own."""
    last = torch.arange(start, start + size)[:, None] if causal else torch.full((size, 1), keys - 1)
    last[queries:] = keys - 1
    bias = torch.zeros(1, 1, size, length, dtype=dtype)
    return bias.masked_fill_(torch.arange(length) > last.clamp(max=keys - 1), float("-inf")).to(device)


def length_allowed(
    query: torch.Tensor, heads: int, queries: int, keys: int, dtype: torch.dtype,
    parts: tuple[int, ...] = (_PART, BLOCK),
) -> int | None:
    """Return the length to pad keys to: the first allowed multiple of one of the parts, or None."""
    # A last block is tried by itself too: the more keys come before it, the less of a difference in it is left to be
    # seen.
    for length in dict.fromkeys(-(-keys // part) * part for part in parts):
        if all(allows(query, heads, queries, tried, dtype) for tried in {length % BLOCK or BLOCK, length}):
            return length
    return None
