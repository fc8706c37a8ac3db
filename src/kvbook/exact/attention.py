"""Scaled dot product attention in which a query's bits depend neither on other queries nor on keys it does not see.

Queries and keys are cut and filled up to shapes that `attention_kernel` allows.  Where it allows none, as on a GPU for
heads wider than 128, which are divided by their sum in another place, they go through blocks of our own.
"""

import functools
from collections.abc import Callable

import torch

from kvbook.exact import attention_kernel, own_keys, pointwise, rows
from kvbook.exact.attention_kernel import BLOCK, QUERIES, causal_mask, kernel, length_allowed, padded
from kvbook.exact.kernels import NotInvariant, no_gradients
from kvbook.exact.visible import MASKED, run

_LARGE = (256, 32)
# Head widths that leave nothing over in the kernel's vectorised loops; others go through blocks of our own. At 10 a
# query's bits changed with its place among 256, in one of a thousand.
_WIDTHS = 16


def forget() -> None:
    """Let go of masks, which on a GPU hold its memory."""
    causal_mask.cache_clear()
    _step.cache_clear()


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for ``scaled_dot_product_attention``; the arguments are its own."""
    no_gradients("scaled_dot_product_attention", query, key, value)
    if attn_mask is None and not (is_causal or dropout_p) and query.dim() == 4:
        asked = query.shape
        # A decode step, in which each microsecond counts: what it needs is looked up once for all layers.
        if asked[2] == 1 == asked[0] and (
            step := _step(query.dtype, query.device, torch.get_num_threads(), asked, key.shape, value.shape, enable_gqa)
        ):
            return step(query, key, value, scale)
    if dropout_p:
        raise NotInvariant("row_invariant() has no attention dropout: call model.eval() first")
    if query.dim() != 4 or query.dtype not in _DTYPES:
        what = f"scaled_dot_product_attention of shapes {tuple(query.shape)}, {tuple(value.shape)} in {query.dtype}"
        raise NotInvariant(f"row_invariant() cannot do {what}: load the model with attn_implementation='eager'")
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    # As torch: only a single key head is shared without being asked for.
    if heads != key_heads and (heads % key_heads or not (enable_gqa or key_heads == 1)):
        raise NotInvariant(f"scaled_dot_product_attention of {heads} heads on {key_heads}: pass enable_gqa=True")
    suits = value.shape[-1] == width and not width % _WIDTHS
    if not (suits and attention_kernel.reference_holds(query.dtype, query.device, width, torch.get_num_threads())):
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


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _one(query, key, value, mask, is_causal, scale) -> torch.Tensor:
    """Attend in one sequence: all with a leading dimension of 1."""
    heads, queries = query.shape[1:3]
    groups = heads // key.shape[1]
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


@functools.lru_cache(maxsize=256)
def _step(dtype, device, threads, asked, keys, values, gqa) -> Callable[..., torch.Tensor] | None:
    """Make the attention of a single query of one sequence, which sees all keys; None where another way must be gone.

    What is asked, keys and values are given by their shapes.  The query heads that share keys become rows: the keys are
    read once.
    """
    if len(keys) != 4 or keys[0] != 1 or keys[3] != asked[3]:
        return None
    width, heads, count = asked[3], keys[1], keys[2]
    groups, rest = divmod(asked[1], heads)
    shared = not rest and 0 < groups <= QUERIES and (groups == 1 or heads == 1 or gqa)
    if not shared or not count or keys != values or width % _WIDTHS or dtype not in _DTYPES:
        return None
    if not attention_kernel.reference_holds(dtype, device, width, threads):
        return None
    like = torch.empty(0, width, dtype=dtype, device=device)
    # Without further queries where these are enough for the reference's bits.
    for queries in dict.fromkeys((groups, QUERIES)):
        if length := length_allowed(like, heads, queries, count, dtype, attention_kernel.PARTS_OF_A_STEP):
            break
    if length is None:
        return None
    bias = causal_mask(0, groups, queries, count, length, False, dtype, device)
    more = torch.zeros(1, heads, length - count, width, dtype=dtype, device=device)

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        query = rows.lined_up(query.reshape(1, heads, groups, width))
        if queries > groups:
            query = torch.constant_pad_nd(query, (0, 0, 0, queries - groups))
        if length > count:
            # Both with one operator: here each call's own cost counts.
            key, value = torch.cat((key, more, value, more), 2).chunk(2, 2)
        else:
            key, value = rows.lined_up(key), rows.lined_up(value)
        out = kernel(query, key, value, bias, scale)
        return (out if queries == groups else out[:, :, :groups]).reshape(asked)

    return step


def _pieces(query, key, value, mask, found, is_causal, scale) -> torch.Tensor:
    """Attend in one sequence whose queries see a run of keys, the one that was found."""
    heads, queries = query.shape[1:3]
    first, stop, bias = 0, min(key.shape[2], queries) if is_causal else key.shape[2], None
    if mask is not None:
        first, stop = found
        bias = own_keys.to_add(mask[..., first:stop], query).expand(-1, -1, queries, -1)
    keys = stop - first
    dtype = query.dtype if bias is None else bias.dtype
    out, filled = [], {}
    start = 0
    while start < queries:
        rest = queries - start
        for size in (*_LARGE, QUERIES):
            if rest >= size or size == QUERIES:
                # Under a causal mask the keys after a piece's last query are blocks that change nothing.
                needed = min(keys, start + size) if is_causal else keys
                if length := length_allowed(query, heads, size, needed, dtype):
                    break
        else:
            length, size = -(-needed // BLOCK) * BLOCK, QUERIES
        count = min(rest, size)
        piece = padded(query, start, start + count, size)
        if bias is None:
            written = causal_mask(start, count, size, min(keys, needed), length, is_causal, dtype, query.device)
        else:
            written = bias.new_full((1, bias.shape[1], size, length), float("-inf"))
            written[:, :, :count, :keys] = bias[:, :, start : start + count]
            written[:, :, count:, 0] = 0
        if length not in filled:
            filled[length] = [padded(x, first, min(stop, first + length), length) for x in (key, value)]
        out.append(_checked(piece, *filled[length], written, scale)[:, :, :count])
        start += count
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def _checked(query, key, value, bias, scale) -> torch.Tensor:
    """Run the kernel on all heads at once where that has the reference's bits, else head by head."""
    heads, size, length = *query.shape[1:3], key.shape[2]
    if attention_kernel.allows(query, heads, size, length, bias.dtype):
        return kernel(rows.lined_up(query), key, value, bias, scale)
    return torch.cat(
        [kernel(*(rows.lined_up(x[:, h : h + 1]) for x in (query, key, value)),
                 bias[:, h % bias.shape[1]][:, None].contiguous(), scale) for h in range(heads)], 1
    )


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
    dtype = query.dtype if mask.dtype == torch.bool else mask.dtype
    for some, keys in alone:
        length = length_allowed(query, len(keys) * key.shape[1], QUERIES, keys.shape[1], dtype)
        length = length or -(-keys.shape[1] // BLOCK) * BLOCK
        asked, k, v, bias = own_keys.drawn(query[:, :, some], key, value, mask[:, :, some], keys, length, QUERIES)
        both = zip(asked.split(QUERIES, 2), bias.split(QUERIES, 2), strict=True)
        parts = [_checked(part, k, v, its.contiguous(), scale) for part, its in both]
        result = torch.cat(parts, 2)[:, :, :groups].reshape(len(keys), query.shape[1], -1).transpose(0, 1)
        out[:, :, some] = result[None, :, : len(some)]
    return out


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
    probabilities, seen = pointwise.softmax(scores, -1, False)
    seen = seen.by_head(shape[1], scores.shape[-1])
    return rows.batched(probabilities.flatten(0, 1), value, seen).unflatten(0, shape).to(query.dtype)
