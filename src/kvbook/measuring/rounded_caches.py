"""A cache whose keys and values are rounded to few bits: what a quantized cache gives back, without its savings.

transformers' own quantized caches are `fp8` (nothing to install) and two integer ones that each need a package; of
these one offers 2 and 4 bits, and the package of the other is not built for every machine.  To see what integers of 8
and 4 bits do to a model's predictions it is enough to round: every token's keys and values are rounded once, when they
enter the cache, and kept in the model's dtype.

The rule is the symmetric one: of every `BLOCK` numbers of a head, the largest magnitude a gives the scale
s = a / (2 ** (bits - 1) - 1), and each number x becomes s * round(x / s).  With 8 bits it is that of llama.cpp's q8_0,
but for the scale, which stays in fp32 here; with 4 bits q4_0 has one level more on one side.
"""

from statistics import fmean

import torch
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvbook import UserError

# Numbers that share a scale; a head that this does not divide has one scale.
BLOCK = 32


def rounded(states: torch.Tensor, bits: int) -> torch.Tensor:
    """Round keys or values to signed integers of a few bits and back."""
    blocks = states.float().unflatten(-1, (-1, _block(states.shape[-1])))
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    # A block of zeros has no scale and stays what it is.
    scale = scale.where(scale > 0, 1.0)
    return ((blocks / scale).round() * scale).flatten(-2).to(states.dtype)


def _block(width: int) -> int:
    return BLOCK if width % BLOCK == 0 else width


class RoundedLayer(DynamicLayer):
    """A growing layer that rounds what enters it.

    Parameters
    ----------
    keys, values : int or None
        Bits of each, as for `rounded`; None leaves them as they are.
    """

    def __init__(self, keys: int | None, values: int | None) -> None:
        super().__init__()
        self.bits = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, ...]:
        """Round, keep, and give everything held; see transformers' ``DynamicLayer``."""
        pairs = zip((key_states, value_states), self.bits, strict=True)
        return super().update(*(rounded(each, bits) if bits else each for each, bits in pairs), *args, **kwargs)

    def bits_per_number(self) -> float:
        """Say what a number takes where it is stored as it was rounded, with its share of an fp32 scale."""
        scale = 32 / _block(self.keys.shape[-1])
        return fmean(bits + scale if bits else 8 * self.keys.itemsize for bits in self.bits)


def make(config: PretrainedConfig, keys: int | None, values: int | None) -> Cache:
    """Make an empty cache that rounds keys and values to so many bits each."""
    if not all_full(config):
        raise UserError("a rounded cache is for full attention only: this model has layers with a window")
    return Cache(layers=[RoundedLayer(keys, values) for _ in range(config.num_hidden_layers)])


def all_full(config: PretrainedConfig) -> bool:
    """Tell whether every layer of a model attends to the whole text."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is None if kinds is None else set(kinds) == {"full_attention"}
