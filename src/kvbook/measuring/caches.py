"""Caches by kind, and the reuse of one that was filled with another prompt.

A cache belongs to token ids, not to text.  Where a longer text is encoded anew, its ids need not begin with those of
its beginning, and `generate` does not look: it cuts as many ids off the prompt as the cache is long.  `reusable` keeps
of a cache what the new prompt's ids really share with it.

Written for transformers 5.23: ``crop`` takes the number of tokens to remove, as a negative number.
"""

import copy
from collections.abc import Sequence
from typing import Literal

from transformers import Cache, DynamicCache, PretrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer

from kvbook import UserError

Kind = Literal["dynamic", "static"]

# Layers that can be cut back, with whether they record what they would forget; older releases lack the last kind.
_CAN_GO_BACK = {("DynamicLayer", False), ("StaticLayer", False), ("DynamicSlidingWindowLayer", True)}


def make(kind: Kind, config: PretrainedConfig, max_cache_len: int) -> Cache:
    """Make an empty cache.

    Parameters
    ----------
    kind : {"dynamic", "static"}
        Growing, or preallocated.
    config : PretrainedConfig
        Of the model that will fill it.
    max_cache_len : int
        Tokens that a static cache has room for; a dynamic one has no bound.

    Raises
    ------
    UserError
        For another kind.
    """
    if kind == "dynamic":
        return DynamicCache(config=config)
    if kind == "static":
        return StaticCache(config=config, max_cache_len=max_cache_len)
    raise UserError(f"no cache of kind {kind!r}: use 'dynamic' or 'static'")


def recording(config: PretrainedConfig) -> DynamicCache:
    """Make an empty growing cache that can be cut back: its windows keep what they would otherwise forget.

    Raises
    ------
    UserError
        When a layer holds a recurrent state, which cannot go back.
    """
    cache = DynamicCache(config=config)
    if not cache.is_croppable:
        raise UserError(f"{config.model_type}: a recurrent state cannot be cut back: choose a model without one")
    cache.activate_past_recording()
    return cache


def length(cache: Cache) -> int:
    """Return the number of tokens that a cache holds, as a plain number for every kind."""
    return int(cache.get_seq_length())


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix.

    Parameters
    ----------
    first, second : sequence of int
        Token ids.
    """
    differing = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def reusable(cache: Cache, cached_ids: Sequence[int], ids: Sequence[int]) -> Cache:
    """Copy of a cache what a prompt can reuse: the longest common prefix of ids, and never the whole prompt.

    The last token of the prompt is left out even where the cache holds it, for a model needs one token to run on: given
    a cache as long as the prompt, `generate` of transformers 5.23 feeds the whole prompt a second time, without an
    error.

    Parameters
    ----------
    cache : Cache
        Filled with `cached_ids`, and with nothing else; it is not changed.
    cached_ids : sequence of int
        The ids that it was filled with, special tokens included.
    ids : sequence of int
        The whole new prompt, which is then given to `generate` whole.

    Returns
    -------
    Cache
        A copy of the same kind, of length ``min(shared_length(cached_ids, ids), len(ids) - 1)``.

    Raises
    ------
    UserError
        When the cache holds another number of tokens than `cached_ids`, when the prompt is empty, or when a layer is of
        a kind that cannot go back (a sliding window has lost its first tokens unless the cache is `recording`, a
        recurrent state its past).
    """
    if (held := length(cache)) != len(cached_ids):
        raise UserError(f"the cache holds {held} tokens, not the {len(cached_ids)} named: name the ids that filled it")
    if not len(ids):
        raise UserError("an empty prompt has nothing to generate from: give it at least one token")
    kept = min(shared_length(cached_ids, ids), len(ids) - 1)
    # The exact classes: what inherits from them may keep a window, or a state besides.
    kinds = {(type(layer).__name__, getattr(layer, "record_past", False)) for layer in cache.layers}
    if other := {kind for kind, _ in kinds - _CAN_GO_BACK}:
        raise UserError(f"a cache of {', '.join(sorted(other))} cannot be cut back: fill a new one for this prompt")
    copied = copy.deepcopy(cache)
    for layer in copied.layers:
        if not isinstance(layer, StaticLayer):
            layer.crop(kept - held)
        elif layer.is_initialized:
            # Its tensors keep their length, and its address must stay: only the counter goes back.  What lies past it
            # is masked until it is overwritten; it is set to zero all the same, so that nothing of the old prompt is
            # left in the copy.
            layer.cumulative_length.fill_(kept)
            layer.keys[:, :, kept:] = 0
            layer.values[:, :, kept:] = 0
    return copied
