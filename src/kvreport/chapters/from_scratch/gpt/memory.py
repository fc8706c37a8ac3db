"""The thread's caches: the posted one that rolls, and the reply's that fills up and is emptied."""

from typing import Literal

import torch

Keeping = Literal["roll", "cat", "emptied", "shuffled", "values late"]
Mask = Literal["causal", "explicit", "none", "unshifted"]
Pair = tuple[torch.Tensor, torch.Tensor]


def mask_of(kind: Mask, rows: int, columns: int, device: torch.device) -> torch.Tensor | None:
    """Make the mask of `rows` new queries over `columns` keys, the last `rows` of which are their own."""
    if kind == "none" or (kind == "causal" and rows == 1):
        return None
    whole = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if kind == "unshifted":
        return whole.tril() if rows > 1 else whole
    return whole.tril(columns - rows)


class RollingMemory:
    """The last `block` keys and values of every layer.

    Parameters
    ----------
    block : int
        How many.
    keeping : {"roll", "cat", "emptied", "shuffled", "values late"}
        ``"roll"``, as posted: a store of fixed size is rolled by what comes, which is written into its last places.
        ``"cat"``: what comes is appended and the oldest dropped.  ``"emptied"``, as the reply's: what comes is
        appended, and where it does not fit, all before it is forgotten.  ``"shuffled"``: as ``"cat"``, handed out in a
        random order, the same for keys and values.  ``"values late"``, a control that must do harm: as ``"cat"``,
        every key with its neighbour's value.
    mask : Mask
        As for `mask_of`.
    """

    def __init__(self, block: int, keeping: Keeping = "cat", mask: Mask = "causal") -> None:
        self.block, self.keeping, self.mask = block, keeping, mask
        self._stores: dict[int, Pair] = {}
        self._held: dict[int, int] = {}

    def take(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Take the new keys and values of a layer; give all that its queries look at, and the mask over them."""
        new, held = keys.shape[2], self._held.get(layer, 0)
        if held + new > self.block:
            if self.keeping == "emptied":
                self._stores.pop(layer, None)
                held = 0
            elif new > 1:
                raise ValueError(f"{new} characters do not fit into a block of {self.block} beside {held}")
        self._held[layer] = held = min(held + new, self.block)
        keep = self._roll if self.keeping == "roll" else self._append
        self._stores[layer] = keep(layer, (keys, values))
        keys, values = (store[:, :, -held:] for store in self._stores[layer])
        if self.keeping == "shuffled":
            order = torch.randperm(held, generator=torch.Generator().manual_seed(held)).to(keys.device)
            keys, values = keys[:, :, order], values[:, :, order]
        elif self.keeping == "values late":
            values = values.roll(1, 2)
        return keys, values, mask_of(self.mask, new, held, keys.device)

    def _append(self, layer: int, fresh: Pair) -> Pair:
        stored = self._stores.get(layer)
        kept = fresh if stored is None else (torch.cat(two, 2) for two in zip(stored, fresh, strict=True))
        return tuple(one[:, :, -self.block :] for one in kept)

    def _roll(self, layer: int, fresh: Pair) -> Pair:
        batch_size, heads, new, head_dim = fresh[0].shape
        empty = fresh[0].new_zeros(batch_size, heads, self.block, head_dim)
        rolled = tuple(store.roll(-new, 2) for store in self._stores.get(layer, (empty, empty)))
        for store, one in zip(rolled, fresh, strict=True):
            store[:, :, -new:] = one
        return rolled
