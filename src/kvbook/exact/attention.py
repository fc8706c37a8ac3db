"""Scaled dot product attention in which a query's bits depend neither on other queries nor on keys it does not see.

torch's CPU kernel walks through the keys in blocks of 512 and keeps a running maximum and sum; on a GPU its memory-efficient
kernel does so in blocks of 64 or 128.  Padded to whole blocks and with the mask written out, a block behind a query's last
key changes nothing; that is tried first, for on a GPU heads wider than 128 are divided by their sum in another place, and go
through blocks of our own.  What remains is the number of queries
and of heads, and a last block that is filled up no further than to a multiple of 128: each is compared bit for bit with the
reference, one head and four queries on whole blocks, the first time that it is wanted.
"""

import functools
import math

import torch

from kvbook.exact import own_keys, rows
from kvbook.exact.kernels import NotInvariant, base, draw, pairs, spread
from kvbook.exact.pointwise import exponential_on, softmax
from kvbook.exact.visible import MASKED, run

BLOCK = 512
# A last block is filled up to a multiple of this many where the bits allow it, so that short texts cost less.
_PART = 128
QUERIES = 4
_LARGE = (256, 32)
# Head widths that leave nothing over in the kernel's vectorised loops; others go through blocks of our own. At 10 a query's
# bits changed with its place among 256, in one of a thousand.
_WIDTHS = 16


# torch's kernel by dispatch key; `base` must hold it before the switch refuses it.
KERNELS = {
    "CPU": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "CUDA": "aten::_scaled_dot_product_efficient_attention",
}


def _kernel(query, key, value, bias, scale):
    if query.is_cuda:
        efficient = base(KERNELS["CUDA"], "CUDA")
        # It wants a mask for each head, in the queries' dtype; heads may share one in memory.
        bias = bias.to(query.dtype).expand(-1, query.shape[1], -1, -1)
        return efficient(query, key, value, bias, False, 0.0, False, scale=scale)[0]
    flash = base(KERNELS["CPU"], "CPU")
    return flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)[0]


_verdicts: dict[tuple[object, ...], bool] = {}


def _allows(like: torch.Tensor, heads: int, queries: int, keys: int, bias_dtype: torch.dtype) -> bool:
    """Tell whether a shape of the kernel gives the reference's bits, by trying it the first time."""
    about = (like.dtype, like.device, like.shape[-1], heads, queries, keys, bias_dtype, torch.get_num_threads())
    if about not in _verdicts:
        _verdicts[about] = _try(like, heads, queries, keys, bias_dtype)
    return _verdicts[about]


# Scores that are left over from sums of zero, see `pairs`, are brought to about this size by a scale. Were they larger, a
# softmax would see a few of the keys only, and a width of 256 in fp16 would pass for what it is not.
_LEFT_OVER = 2.0**-4
# Keys are paired within stretches of this many, and queries see whole stretches, so that their sums of values are zero too.
_STRETCH = 32


def _telling(like: torch.Tensor, heads: int, queries: int, keys: int, bias_dtype: torch.dtype):
    """Make queries, keys, values and a mask whose result tells the order of every addition in it; and a scale."""
    width = like.shape[-1]
    q, k = draw((1, heads, queries, width), 1), draw((1, heads, keys, width), 2)
    v = draw((1, heads, keys, width), 3, scale=16)
    plus, minus = pairs(width, 4)
    q[..., plus] *= spread(len(plus))
    q[..., minus], k[..., minus] = q[..., plus], -k[..., plus]
    if width % 2:
        q[..., torch.ones(width, dtype=torch.bool).index_fill_(0, torch.cat([plus, minus]), False)] = 0
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
    scale = 2.0 ** round(math.log2(_LEFT_OVER / left))
    return *(x.to(like.device) for x in (q, k, v, bias)), seen, scale


def _try(like: torch.Tensor, heads: int, queries: int, keys: int, bias_dtype: torch.dtype) -> bool:
    q, k, v, bias, seen, scale = _telling(like, heads, queries, keys, bias_dtype)
    tried = _kernel(q, k, v, bias, scale)
    whole = -(-keys // BLOCK) * BLOCK
    k, v = (_padded(x, 0, keys, whole) for x in (k, v))
    bias = torch.cat([bias, bias.new_full((1, 1, queries, whole - keys), float("-inf"))], -1)
    for head in {0, heads // 2, heads - 1}:
        one = slice(head, head + 1)
        for start in range(0, queries, QUERIES):
            some = slice(start, start + QUERIES)
            # No longer than the longest of these queries needs: blocks behind it must change nothing.
            needed = -(-int(seen[some].max()) // BLOCK) * BLOCK
            expected = _kernel(
                *(rows.lined_up(x) for x in (q[:, one, some], k[:, one, :needed], v[:, one, :needed])),
                bias[:, :, some, :needed].contiguous(), scale,
            )  # fmt: skip
            if not torch.equal(tried[:, one, some], expected):
                return False
    return True


@functools.cache
def _reference_holds(dtype: torch.dtype, device: torch.device, width: int, _threads: int) -> bool:
    """Tell whether the reference's four queries are treated alike, whatever lies beside them and however many blocks follow."""
    q, k, v, bias, _, scale = _telling(torch.empty(0, width, dtype=dtype, device=device), 1, QUERIES, BLOCK, dtype)
    bias[:] = bias[:, :, 2:3]
    try:
        mixed = _kernel(q, k, v, bias, scale)
    except RuntimeError:
        # A GPU for which torch has no such kernel.
        return False
    return _blocks_behind_change_nothing(k) and all(
        torch.equal(_kernel(q[:, :, [place] * QUERIES], k, v, bias, scale), mixed[:, :, [place] * QUERIES])
        for place in range(QUERIES)
    )


def _blocks_behind_change_nothing(like: torch.Tensor) -> bool:
    """Tell whether queries that see no more than one block's keys have equal bits on one block and on two."""
    q, k, v, bias, _, scale = _telling(like, 1, QUERIES, 2 * BLOCK, like.dtype)
    seen = torch.tensor([_STRETCH, BLOCK // 2, BLOCK - _STRETCH, BLOCK], device=like.device)
    bias.zero_().masked_fill_(torch.arange(2 * BLOCK, device=like.device) >= seen[:, None], float("-inf"))
    one = _kernel(q, *(rows.lined_up(x[:, :, :BLOCK]) for x in (k, v)), bias[..., :BLOCK].contiguous(), scale)
    return torch.equal(_kernel(q, k, v, bias, scale), one)


def forget() -> None:
    """Let go of masks, which on a GPU hold its memory."""
    _causal.cache_clear()
    _of_a_step.cache_clear()


def _padded(x: torch.Tensor, start: int, stop: int, length: int) -> torch.Tensor:
    """Copy a stretch of keys or values, shape (1, heads, stop - start, width), and fill it up with zeros."""
    # One operator instead of three: in a decode step each call's own cost counts.
    return torch.constant_pad_nd(x[:, :, start:stop], (0, 0, 0, length - (stop - start)))


@functools.lru_cache(maxsize=256)
def _causal(
    start: int, queries: int, size: int, keys: int, length: int, causal: bool, dtype: torch.dtype, device: torch.device
):
    """Write out the mask of a stretch of queries, shape (1, 1, size, length), that see all keys or those up to their own."""
    last = torch.arange(start, start + size)[:, None] if causal else torch.full((size, 1), keys - 1)
    last[queries:] = keys - 1
    bias = torch.zeros(1, 1, size, length, dtype=dtype)
    return bias.masked_fill_(torch.arange(length) > last.clamp(max=keys - 1), float("-inf")).to(device)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for ``scaled_dot_product_attention``; the arguments are its own."""
    if dropout_p:
        raise NotInvariant("row_invariant() has no attention dropout: call model.eval() first")
    if query.dim() != 4 or query.dtype not in _DTYPES:
        raise NotInvariant(
            f"row_invariant() cannot do scaled_dot_product_attention of shapes {tuple(query.shape)}, "
            f"{tuple(value.shape)} in {query.dtype}: load the model with attn_implementation='eager'"
        )
    check_heads(query, key, enable_gqa)
    width = query.shape[-1]
    if (
        value.shape[-1] != width
        or width % _WIDTHS
        or not _reference_holds(query.dtype, query.device, width, torch.get_num_threads())
    ):
        return attend_in_blocks(query, key, value, attn_mask, is_causal, scale)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if len(query) == 1:
        return _one(query, key, value, attn_mask, is_causal, scale)
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3]).transpose(1, 2)
    for index in range(len(query)):
        one = slice(index, index + 1)
        mask = None if attn_mask is None else attn_mask[one if len(attn_mask) > 1 else slice(None)]
        out[one] = _one(query[one], key[one], value[one], mask, is_causal, scale)
    return out


def check_heads(query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
    """Refuse numbers of heads that torch refuses: only a single key head is shared without being asked for."""
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and (heads % key_heads or not (enable_gqa or key_heads == 1)):
        raise NotInvariant(f"scaled_dot_product_attention of {heads} heads on {key_heads}: pass enable_gqa=True")


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _one(query, key, value, mask, is_causal, scale) -> torch.Tensor:
    """Attend in one sequence: all with a leading dimension of 1."""
    heads, queries = query.shape[1:3]
    groups = heads // key.shape[1]
    if queries == 1 and mask is None and not is_causal and groups <= QUERIES:
        _, key_heads, keys, width = key.shape
        if found := _of_a_step(query.dtype, query.device, key_heads, groups, keys, width, torch.get_num_threads()):
            length, bias = found
            more = (0, 0, 0, length - keys)
            asked = torch.constant_pad_nd(query.reshape(1, key_heads, groups, width), (0, 0, 0, QUERIES - groups))
            out = _kernel(asked, torch.constant_pad_nd(key, more), torch.constant_pad_nd(value, more), bias, scale)
            return out[:, :, :groups].reshape(1, heads, 1, width)
    visible = found = None
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask >= MASKED
        if (found := run(visible)) is None:
            return _each_by_itself(query, key, value, mask, visible.expand(1, -1, queries, -1), scale)
    if groups > 1 and queries == 1:
        # The query heads that share keys become rows: the keys are read once.
        query = query.reshape(1, key.shape[1], groups, -1)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(1, key.shape[1], groups, -1)
        return _pieces(query, key, value, mask, found, False, scale).reshape(1, heads, 1, -1)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return _pieces(query, key, value, mask, found, is_causal, scale)


@functools.lru_cache(maxsize=64)
def _of_a_step(
    dtype: torch.dtype, device: torch.device, key_heads: int, groups: int, keys: int, width: int, _threads: int
):
    """Look up for all layers of a decode step at once what `_pieces` would: the length of the keys, and the mask.

    None where that shape of the kernel is not allowed.
    """
    length = _length(torch.empty(0, width, dtype=dtype, device=device), key_heads, QUERIES, keys, dtype)
    return length and (length, _causal(0, groups, QUERIES, keys, length, False, dtype, device))


def _pieces(query, key, value, mask, found, is_causal, scale) -> torch.Tensor:
    """Attend in one sequence whose queries see a run of keys, the one that was found."""
    heads, queries = query.shape[1:3]
    first, stop, bias = 0, min(key.shape[2], queries) if is_causal else key.shape[2], None
    if mask is not None:
        first, stop = found
        bias = mask[..., first:stop]
        if bias.dtype == torch.bool:
            bias = query.new_zeros(bias.shape).masked_fill_(~bias, float("-inf"))
        bias = bias.expand(-1, -1, queries, -1)
    keys = stop - first
    dtype = query.dtype if bias is None else bias.dtype
    out, padded = [], {}
    start = 0
    while start < queries:
        rest = queries - start
        for size in (*_LARGE, QUERIES):
            if rest >= size or size == QUERIES:
                # Under a causal mask the keys behind a piece's last query are blocks that change nothing.
                needed = min(keys, start + size) if is_causal else keys
                length = _length(query, heads, size, needed, dtype)
                if length:
                    break
        else:
            length, size = -(-needed // BLOCK) * BLOCK, QUERIES
        count = min(rest, size)
        piece = query[:, :, start : start + count]
        if count < size:
            piece = torch.constant_pad_nd(piece, (0, 0, 0, size - count))
        if bias is None:
            written = _causal(start, count, size, min(keys, needed), length, is_causal, dtype, query.device)
        else:
            written = bias.new_full((1, bias.shape[1], size, length), float("-inf"))
            written[:, :, :count, :keys] = bias[:, :, start : start + count]
            written[:, :, count:, 0] = 0
        if length not in padded:
            end = min(stop, first + length)
            padded[length] = [_padded(x, first, end, length) for x in (key, value)]
        out.append(_checked(piece, *padded[length], written, scale)[:, :, :count])
        start += count
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def _checked(query, key, value, bias, scale) -> torch.Tensor:
    """Run the kernel on all heads at once where that has the reference's bits, else head by head."""
    heads, size, length = *query.shape[1:3], key.shape[2]
    if _allows(query, heads, size, length, bias.dtype):
        return _kernel(rows.lined_up(query), key, value, bias, scale)
    return torch.cat(
        [_kernel(*(rows.lined_up(x[:, h : h + 1]) for x in (query, key, value)),
                 bias[:, h % bias.shape[1]][:, None].contiguous(), scale) for h in range(heads)], 1
    )  # fmt: skip


def _each_by_itself(query, key, value, mask, visible, scale) -> torch.Tensor:
    """Attend in one sequence whose queries see keys that no one alignment serves."""
    groups = query.shape[1] // key.shape[1]
    if not bool((visible == visible[:, :1]).all()):
        # Keys are chosen for each head: head by head.
        parts = []
        for head in range(query.shape[1]):
            one, shared = slice(head, head + 1), slice(head // groups, head // groups + 1)
            parts.append(_one(query[:, one], key[:, shared], value[:, shared], mask[:, one], False, scale))
        return torch.cat(parts, 1)
    mask = mask.expand(-1, -1, query.shape[2], -1)
    out = torch.empty_like(query)
    stretches, alone = own_keys.stretches(visible[0, 0])
    for some, found in stretches:
        k, v = (x.repeat_interleave(groups, 1) for x in (key, value)) if groups > 1 else (key, value)
        out[:, :, some] = _pieces(query[:, :, some], k, v, mask[:, :, some], found, False, scale)
    for some, keys in alone:
        dtype = query.dtype if mask.dtype == torch.bool else mask.dtype
        length = _length(query, len(keys) * key.shape[1], QUERIES, keys.shape[1], dtype)
        length = length or -(-keys.shape[1] // BLOCK) * BLOCK
        asked, k, v, bias = own_keys.drawn(query[:, :, some], key, value, mask[:, :, some], keys, length, QUERIES)
        parts = [
            _checked(part, k, v, its.contiguous(), scale)
            for part, its in zip(asked.split(QUERIES, 2), bias.split(QUERIES, 2), strict=True)
        ]
        result = torch.cat(parts, 2)[:, :, :groups].reshape(len(keys), query.shape[1], -1).transpose(0, 1)
        out[:, :, some] = result[None, :, : len(some)]
    return out


def _length(query: torch.Tensor, heads: int, queries: int, keys: int, dtype: torch.dtype) -> int | None:
    """Give the length that the keys are padded to, or None where this shape is not allowed."""
    lengths = dict.fromkeys(-(-keys // step) * step for step in (_PART, BLOCK))
    return next((length for length in lengths if _allows(query, heads, queries, length, dtype)), None)


def attend_in_blocks(query, key, value, attn_mask, is_causal, scale) -> torch.Tensor:
    """Attend by batched products and a softmax, where the machine's kernel cannot be used; slower, and as invariant."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1).flatten(0, 1).float() for x in (key, value))
    shape = query.shape[:2]
    scores = rows.batched(query.flatten(0, 1).float(), key.transpose(1, 2)).unflatten(0, shape)
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        # No lower than the lowest number: a query that sees nothing is padding, and what it gives must be a number.
        lowest = torch.finfo(scores.dtype).min
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, lowest) if hidden else (scores + attn_mask).clamp(min=lowest)
    probabilities, seen = softmax(scores, -1, False, exponential_on(query))
    seen = seen.by_head(shape[1], scores.shape[-1])
    return rows.batched(probabilities.flatten(0, 1), value, seen).unflatten(0, shape).to(query.dtype)
