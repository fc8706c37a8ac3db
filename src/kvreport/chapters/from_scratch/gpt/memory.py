"""The thread's caches, each a `Memory`: the posted one that rolls, and the reply's that fills up and is emptied."""

from typing import Literal

import torch

from kvreport.chapters.from_scratch.gpt.model import Mask, mask_of

Keeping = Literal["roll", "cat", "shuffled", "values late"]


class RollingMemory:
    """The last `block` keys and values of every layer.

    Parameters
    ----------
    block : int
        How many.
    keeping : {"roll", "cat", "shuffled", "values late"}
        ``"roll"``, as posted: a store of fixed size is rolled by what comes, which is written into its last places.
        ``"cat"``: what comes is appended and the oldest dropped.  ``"shuffled"``: as ``"cat"``, handed out in a random
        order, the same for keys and values.  ``"values late"``, a control that must do harm: as ``"cat"``, every key
        with its neighbour's value.
    mask : Mask
        As for `mask_of`.
    """

    def __init__(self, block: int, keeping: Keeping = "cat", mask: Mask = "causal") -> None:
        self.block, self.keeping, self.mask = block, keeping, mask
        self._stores: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._held: dict[int, int] = {}

    def take(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `Memory.take`."""
        new = keys.shape[2]
        held = min(self._held.get(layer, 0) + new, self.block)
        if new > 1 and self._held.get(layer, 0) + new > self.block:
            raise ValueError(f"{new} characters do not fit into a block of {self.block} beside {self._held[layer]}")
        keep = self._roll if self.keeping == "roll" else self._append
        keys, values = keep(layer, keys, values)
        self._held[layer] = held
        keys, values = keys[:, :, -held:], values[:, :, -held:]
        if self.keeping == "shuffled":
            order = torch.randperm(held, generator=torch.Generator().manual_seed(held)).to(keys.device)
            keys, values = keys[:, :, order], values[:, :, order]
        elif self.keeping == "values late":
            values = values.roll(1, 2)
        return keys, values, mask_of(self.mask, new, held, keys.device)

    def _append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self._stores:
            old_keys, old_values = self._stores[layer]
            keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
        self._stores[layer] = keys[:, :, -self.block :], values[:, :, -self.block :]
        return self._stores[layer]

    def _roll(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch_size, heads, new, head_dim = keys.shape
        if layer not in self._stores:
            empty = keys.new_zeros(batch_size, heads, self.block, head_dim)
            self._stores[layer] = empty, empty.clone()
        rolled = tuple(store.roll(-new, 2) for store in self._stores[layer])
        for store, fresh in zip(rolled, (keys, values), strict=True):
            store[:, :, -new:] = fresh
        self._stores[layer] = rolled
        return rolled


class FillingMemory:
    """The reply's store: it grows to `block` and forgets everything when what comes does not fit any more.

    Parameters
    ----------
    block : int
        How many keys and values it holds.
    mask : Mask
        The reply's is ``"unshifted"``.
    """

    def __init__(self, block: int, mask: Mask = "unshifted") -> None:
        self.block, self.mask = block, mask
        self._stores: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `Memory.take`."""
        new = keys.shape[2]
        if layer in self._stores:
            old_keys, old_values = self._stores[layer]
            if old_keys.shape[2] + new <= self.block:
                keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
        self._stores[layer] = keys, values
        return keys, values, mask_of(self.mask, new, keys.shape[2], keys.device)
