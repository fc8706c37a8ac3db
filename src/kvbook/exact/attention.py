"""Scaled dot product attention in which a query's bits depend neither on other queries nor on keys it does not see.

torch's CPU kernel walks through the keys in blocks of 512 and keeps a running maximum and sum.  Padded to whole blocks
and with the mask written out, a block behind a query's last key changes nothing.  What remains is the number of queries
and of heads, and shorter last blocks: each is compared bit for bit with the reference, one head, four queries, whole
blocks, the first time that it is wanted.
"""

import functools
from collections.abc import Callable

import torch

from kvbook.exact import rows
from kvbook.exact.kernels import NotInvariant, base, random
from kvbook.exact.pointwise import MASKED, leading

BLOCK = 512
QUERIES = 4
_LARGE = (256, 32)
_SHORT = (64, 128, 256)


def _kernel(query, key, value, bias, scale):
    flash = base("aten::_scaled_dot_product_flash_attention_for_cpu", "CPU")
    return flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)[0]


_verdicts: dict[tuple[object, ...], bool] = {}


def _allows(like: torch.Tensor, heads: int, queries: int, keys: int, bias_dtype: torch.dtype) -> bool:
    """Tell whether a shape of the kernel gives the reference's bits, by trying it the first time."""
    about = (like.dtype, like.shape[-1], heads, queries, keys, bias_dtype, torch.get_num_threads())
    if about not in _verdicts:
        _verdicts[about] = _try(like, heads, queries, keys, bias_dtype)
    return _verdicts[about]


def _try(like: torch.Tensor, heads: int, queries: int, keys: int, bias_dtype: torch.dtype) -> bool:
    width = like.shape[-1]
    whole = -(-keys // BLOCK) * BLOCK
    q = random((1, heads, queries, width), like, 1)
    k, v = (random((1, heads, whole, width), like, seed) for seed in (2, 3))
    # Every query sees another number of keys, from one to all.
    seen = torch.linspace(1, keys, queries).round().long() if queries > 1 else torch.tensor([keys])
    bias = torch.zeros(1, 1, queries, whole, dtype=bias_dtype)
    bias.masked_fill_(torch.arange(whole) >= seen[:, None], float("-inf"))
    tried = _kernel(q, k[:, :, :keys], v[:, :, :keys], bias[..., :keys].contiguous(), None)
    for head in {0, heads // 2, heads - 1}:
        one = slice(head, head + 1)
        for start in range(0, queries, QUERIES):
            rows_ = slice(start, start + QUERIES)
            # No longer than the longest of these queries needs: blocks behind it must change nothing.
            needed = -(-int(seen[rows_].max()) // BLOCK) * BLOCK
            expected = _kernel(
                q[:, one, rows_].contiguous(), k[:, one, :needed].contiguous(), v[:, one, :needed].contiguous(),
                bias[:, :, rows_, :needed].contiguous(), None,
            )  # fmt: skip
            if not torch.equal(tried[:, one, rows_], expected):
                return False
    return True


@functools.cache
def _reference_holds(dtype: torch.dtype, width: int, threads: int) -> bool:
    """Tell whether the four queries of the reference are treated alike, whatever lies beside them."""
    like = torch.empty(0, width, dtype=dtype)
    q = random((1, 1, QUERIES, width), like, 1)
    k, v = (random((1, 1, BLOCK, width), like, seed) for seed in (2, 3))
    bias = torch.zeros(1, 1, QUERIES, BLOCK, dtype=dtype)
    bias[..., 300:] = float("-inf")
    mixed = _kernel(q, k, v, bias, None)
    return all(
        torch.equal(_kernel(q[:, :, [place] * QUERIES], k, v, bias, None), mixed[:, :, [place] * QUERIES])
        for place in range(QUERIES)
    )


def _padded(x: torch.Tensor, start: int, stop: int, length: int) -> torch.Tensor:
    """Copy a stretch of keys or values, shape (1, heads, stop - start, width), and fill it up with zeros."""
    out = x.new_empty(1, x.shape[1], length, x.shape[3])
    out[:, :, : stop - start] = x[:, :, start:stop]
    out[:, :, stop - start :] = 0
    return out


@functools.lru_cache(maxsize=256)
def _causal(start: int, queries: int, size: int, keys: int, length: int, causal: bool, dtype: torch.dtype):
    """Write out the mask of a stretch of queries, shape (1, 1, size, length), that see all keys or those up to their own."""
    last = torch.arange(start, start + size)[:, None] if causal else torch.full((size, 1), keys - 1)
    last[queries:] = keys - 1
    bias = torch.zeros(1, 1, size, length, dtype=dtype)
    return bias.masked_fill_(torch.arange(length) > last.clamp(max=keys - 1), float("-inf"))


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
    """Stand in for ``scaled_dot_product_attention`` on a CPU; the arguments are its own.

    Parameters
    ----------
    query : Tensor, shape (batch_size, heads, queries, head_dim)
        Queries.
    key, value : Tensor, shape (batch_size, key_heads, keys, head_dim)
        With ``enable_gqa``, `key_heads` divides `heads`.
    attn_mask : Tensor, shape broadcastable to (batch_size, heads, queries, keys), optional
        Of bool, True where a query sees a key; or a bias that is added to the scores.

    Raises
    ------
    NotInvariant
        For dropout, for values of another width than the keys, for a mask in which queries begin at different keys, and
        where the machine's kernel does not treat four queries alike.
    """
    if dropout_p:
        raise NotInvariant("row_invariant() has no attention dropout: call model.eval() first")
    if query.dim() != 4 or query.shape[-1] != value.shape[-1] or query.dtype not in _DTYPES:
        raise NotInvariant(
            f"row_invariant() cannot do scaled_dot_product_attention of shapes {tuple(query.shape)}, "
            f"{tuple(value.shape)} in {query.dtype}: load the model with attn_implementation='eager'"
        )
    if not _reference_holds(query.dtype, query.shape[-1], torch.get_num_threads()):
        raise NotInvariant(
            "row_invariant() found that this machine's scaled_dot_product_attention does not treat queries alike: "
            "load the model with attn_implementation='eager'"
        )
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    out = torch.empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3], dtype=query.dtype).transpose(1, 2)
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
    if groups > 1 and queries == 1:
        # The query heads that share keys become rows: the keys are read once.
        query = query.reshape(1, key.shape[1], groups, -1)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(1, key.shape[1], groups, -1)
        return _pieces(query, key, value, mask, False, scale).reshape(1, heads, 1, -1)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return _pieces(query, key, value, mask, is_causal, scale)


def _pieces(query, key, value, mask, is_causal, scale) -> torch.Tensor:
    heads, queries, width = query.shape[1:]
    first, stop, bias = 0, min(key.shape[2], queries) if is_causal else key.shape[2], None
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask >= MASKED
        first, stop = leading(visible, "scaled_dot_product_attention")
        bias = mask[..., first:stop]
        if bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
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
            piece = torch.cat([piece, piece.new_zeros(1, heads, size - count, width)], 2)
        if bias is None:
            written = _causal(start, count, size, min(keys, needed), length, is_causal, dtype)
        else:
            written = bias.new_full((1, bias.shape[1], size, length), float("-inf"))
            written[:, :, :count, :keys] = bias[:, :, start : start + count]
            written[:, :, count:, 0] = 0
        if length not in padded:
            end = min(stop, first + length)
            padded[length] = [_padded(x, first, end, length) for x in (key, value)]
        if _allows(query, heads, size, length, dtype):
            result = _kernel(piece.contiguous(), *padded[length], written, scale)
        else:
            result = torch.cat(
                [_kernel(piece[:, h : h + 1].contiguous(), *(x[:, h : h + 1].contiguous() for x in padded[length]),
                         written[:, h % written.shape[1]][:, None].contiguous(), scale) for h in range(heads)], 1
            )  # fmt: skip
        out.append(result[:, :, :count])
        start += count
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def _length(query: torch.Tensor, heads: int, queries: int, keys: int, dtype: torch.dtype) -> int | None:
    """Give the shortest length to pad the keys to that is allowed, or None."""
    whole, rest = divmod(keys, BLOCK)
    tails = [whole * BLOCK + size for size in _SHORT if size >= rest] if rest else []
    for length in (*tails, -(-keys // BLOCK) * BLOCK):
        if _allows(query, heads, queries, length, dtype):
            return length
    return None


def attend_in_blocks(softmax: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give attention made of batched products and a softmax, for devices whose kernels are not looked into."""

    def function(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        if dropout_p:
            raise NotInvariant("row_invariant() has no attention dropout: call model.eval() first")
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        shape = query.shape[:2]
        scores = rows.batched(query.flatten(0, 1).float(), key.flatten(0, 1).float().transpose(1, 2)) * scale
        scores = scores.unflatten(0, shape)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
        probabilities = softmax(scores, -1, False)
        return rows.batched(probabilities.flatten(0, 1), value.flatten(0, 1).float()).unflatten(0, shape).to(query.dtype)

    return function
