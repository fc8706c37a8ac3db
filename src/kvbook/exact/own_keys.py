"""Drawing every query's own keys together, for attention under a mask that no one alignment of blocks serves.

What one query sees then begins at the first place of the first block, as it does in a decode step.  Several queries go
through the kernel at once as heads, for heads are what a kernel's shape is tried on.
"""

import torch

from kvbook.exact.visible import run

# So many queries are attended to at a time: more would need more memory for their keys.
_TOGETHER = 8


def stretches(visible: torch.Tensor):
    """Cut queries into stretches that one alignment serves, and queries that stand alone."""
    # A query that sees nothing is padding: what it gives is of no use, but must be a number.
    visible = visible | ~visible.any(-1, keepdim=True)
    count = visible.sum(-1)
    first = visible.int().argmax(-1)
    last = visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1)
    begins = torch.where(count == last - first + 1, first, -1).tolist()
    together, single, start = [], [], 0
    for stop in range(1, len(begins) + 1):
        if stop == len(begins) or begins[stop] != begins[start] or begins[start] < 0:
            if stop - start > 1:
                together.append((list(range(start, stop)), run(visible[start:stop])))
            else:
                single.append(start)
            start = stop
    size = _TOGETHER if len(single) > 1 else 1
    alone = []
    for index in range(0, len(single), size):
        some = single[index : index + size]
        asked = some + some[:1] * (size - len(some))
        alone.append((some, _places(visible[asked], int(count[asked].max()))))
    return together, alone


def _places(visible: torch.Tensor, most: int) -> torch.Tensor:
    """List the keys that each query sees, shape (queries, most), filled up with minus one."""
    order = torch.argsort(visible.logical_not().to(torch.uint8), dim=-1, stable=True)[:, :most]
    return order.masked_fill(~visible.gather(-1, order), -1)


def drawn(query, key, value, mask, keys: torch.Tensor, length: int, rows: int):
    """Lay queries out as heads, each with the keys that it sees."""
    heads, queries, width = query.shape[1:]
    n, key_heads = len(keys), key.shape[1]
    groups = heads // key_heads
    asked = [*range(queries), *[0] * (n - queries)]
    keys = torch.nn.functional.pad(keys, (0, length - keys.shape[1]), value=-1)
    missing, places = keys < 0, keys.clamp(min=0)
    q = (
        query[0, :, asked]
        .view(key_heads, groups, n, width)
        .permute(2, 0, 1, 3)
        .reshape(1, n * key_heads, groups, width)
    )
    q = torch.constant_pad_nd(q, (0, 0, 0, -groups % rows))
    k, v = (
        x[0][:, places]
        .transpose(0, 1)
        .masked_fill(missing[:, None, :, None], 0)
        .reshape(1, n * key_heads, length, width)
        for x in (key, value)
    )
    given = mask[0, :, asked]
    if given.dtype == torch.bool:
        given = query.new_zeros(given.shape).masked_fill_(~given, float("-inf"))
    bias = given.gather(-1, places.expand(len(given), -1, -1)).masked_fill(missing, float("-inf"))
    if len(given) == 1:
        bias = bias[0, :, None, None].expand(n, key_heads, 1, length)
        return q, k, v, bias.reshape(1, n * key_heads, 1, length).expand(-1, -1, q.shape[2], -1)
    bias = bias.view(key_heads, groups, n, length).permute(2, 0, 1, 3).reshape(1, n * key_heads, groups, length)
    # A row that is there to fill up sees the first key.
    more = bias.new_full((1, n * key_heads, -groups % rows, length), float("-inf"))
    more[..., 0] = 0
    return q, k, v, torch.cat([bias, more], 2)
