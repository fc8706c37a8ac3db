"""Drawing every query's own keys together, for attention under a mask that no one alignment of blocks serves.

What one query sees then begins at the first place of the first block, as it does in a decode step.  Several queries go
through the kernel at once as heads, for heads are what a kernel's shape is tried on.
"""

import itertools

import torch

from kvbook.exact.visible import beginnings, run

# So many queries are attended to at a time: more would need more memory for their keys.
_TOGETHER = 8


def stretches(visible: torch.Tensor):
    """Cut queries into stretches that one alignment serves, and queries that stand alone."""
    # A query that sees nothing is padding: what it gives is of no use, but must be a number.
    visible = visible | ~visible.any(-1, keepdim=True)
    together, single, start = [], [], 0
    for first, group in itertools.groupby(beginnings(visible)):
        queries = list(range(start, start + len(list(group))))
        if first is None or len(queries) == 1:
            single += queries
        else:
            together.append((queries, run(visible[queries])))
        start += len(queries)
    size = _TOGETHER if len(single) > 1 else 1
    alone = []
    for index in range(0, len(single), size):
        some = single[index : index + size]
        asked = some + some[:1] * (size - len(some))
        alone.append((some, _places(visible[asked], int(visible[asked].sum(-1).max()))))
    return together, alone


def _places(visible: torch.Tensor, most: int) -> torch.Tensor:
    """List the keys that each query sees, shape (queries, most), filled up with minus one."""
    order = torch.argsort(visible.logical_not().to(torch.uint8), dim=-1, stable=True)[:, :most]
    return order.masked_fill(~visible.gather(-1, order), -1)


def to_add(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Turn a mask of truth values into one that is added to scores."""
    return query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else mask


def drawn(query, key, value, mask, keys: torch.Tensor, length: int, rows: int):
    """Lay queries out as heads, each with the keys that it sees."""
    heads, queries, width = query.shape[1:]
    n, key_heads = len(keys), key.shape[1]
    groups = heads // key_heads
    asked = [*range(queries), *[0] * (n - queries)]
    keys = torch.nn.functional.pad(keys, (0, length - keys.shape[1]), value=-1)
    missing, places = keys < 0, keys.clamp(min=0)

    def as_heads(x: torch.Tensor) -> torch.Tensor:
        of_groups = x.view(key_heads, groups, n, x.shape[-1])
        return of_groups.permute(2, 0, 1, 3).reshape(1, n * key_heads, groups, x.shape[-1])

    q = torch.constant_pad_nd(as_heads(query[0, :, asked]), (0, 0, 0, -groups % rows))
    seen = (x[0][:, places].transpose(0, 1).masked_fill(missing[:, None, :, None], 0) for x in (key, value))
    k, v = (x.reshape(1, n * key_heads, length, width) for x in seen)
    given = to_add(mask[0, :, asked], query)
    bias = given.gather(-1, places.expand(len(given), -1, -1)).masked_fill(missing, float("-inf"))
    if len(given) == 1:
        bias = bias[0, :, None, None].expand(n, key_heads, 1, length)
        return q, k, v, bias.reshape(1, n * key_heads, 1, length).expand(-1, -1, q.shape[2], -1)
    bias = as_heads(bias)
    # A row that is there to fill up sees the first key.
    more = bias.new_full((1, n * key_heads, -groups % rows, length), float("-inf"))
    more[..., 0] = 0
    return q, k, v, torch.cat([bias, more], 2)
