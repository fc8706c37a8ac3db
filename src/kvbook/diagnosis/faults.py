"""Bugs to inject into a stock model's cached pass, each a context manager that takes it out again.

They strike where something is in the cache: the full pass, and the first call of a cached one, are left alone, except
by `no_cache`, `stale_window`, `texts_swapped`, `padding_seen`, `mask_ignored_alone` and `first_token_hidden`.  None is
safe in threads.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, StaticCache

from kvbook.diagnosis import feeding

Layers = Collection[int] | None
Injected = AbstractContextManager[Any]
# Given the ids and the cache's length, further arguments of the call.
_Change = Callable[[torch.Tensor, int], dict[str, torch.Tensor]]


def upper_left_mask() -> Injected:
    """Align every causal mask of a ``with`` block to the upper left, as Falcon's code of mid-2023 did.

    Not safe in threads: torch's function is replaced for the length of the block.
    """
    stock = functional.scaled_dot_product_attention

    def attend(query, key, value, **options):
        return stock(query, key, value, **options | {"attn_mask": None, "is_causal": True})

    return patch.object(functional, "scaled_dot_product_attention", attend)


def _length(cache: Cache | None) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def _calls(model: PreTrainedModel, call: Callable[..., Any]) -> Injected:
    """Change every call of a model: `call` is given the stock forward, the ids, the cache and further arguments."""
    stock, name = model.forward, feeding.cache_name(model)

    def on_a_cache(ids, past_key_values=None, **options):
        return stock(ids, **{name: past_key_values}, **options)

    # The signature stays: transformers looks at it.
    @wraps(stock)
    def forward(input_ids, **options):
        # From 5.24 on transformers calls it `cache`, and takes the older name too.
        given = [options.pop(each, None) for each in (name, "past_key_values")]
        return call(on_a_cache, input_ids, next((one for one in given if one is not None), None), options)

    return patch.object(model, "forward", forward)


def _calls_on_a_cache(
    model: PreTrainedModel, change: _Change | None = None, around: Callable[[Cache], Injected] | None = None
) -> Injected:
    """Change every call of a model that has something in its cache: its arguments, or what is around it."""

    def call(stock, ids, cache, options):
        held = _length(cache)
        if held and change:
            options |= change(ids, held)
        with around(cache) if held and around else nullcontext():
            return stock(ids, past_key_values=cache, **options)

    return _calls(model, call)


def _new_positions(ids: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    return {"position_ids": torch.arange(first, first + ids.shape[1], device=ids.device)[None]}


def offset_forgotten(model: PreTrainedModel) -> Injected:
    """Count the positions of new tokens from 0, as if nothing were in the cache."""
    return _calls_on_a_cache(model, lambda ids, _held: _new_positions(ids, 0))


def offset_forgotten_in_chunks(model: PreTrainedModel) -> Injected:
    """Count the positions of several new tokens from 0; a single one has the right position."""
    return _calls_on_a_cache(model, lambda ids, _held: _new_positions(ids, 0) if ids.shape[1] > 1 else {})


def offset_by_one(model: PreTrainedModel) -> Injected:
    """Count the positions of new tokens one too low."""
    return _calls_on_a_cache(model, lambda ids, held: _new_positions(ids, held - 1))


def offset_by_one_far_on(model: PreTrainedModel, at: int = 30) -> Injected:
    """Do so only once the cache holds so many tokens."""
    return _calls_on_a_cache(model, lambda ids, held: _new_positions(ids, held - 1) if held >= at else {})


def _seen(ids: torch.Tensor, held: int, hidden: slice) -> dict[str, torch.Tensor]:
    mask = torch.ones(ids.shape[0], held + ids.shape[1], dtype=torch.long, device=ids.device)
    mask[:, hidden] = 0
    return {"attention_mask": mask}


def mask_off_by_one(model: PreTrainedModel) -> Injected:
    """Hide the newest cached token from the new ones."""
    return _calls_on_a_cache(model, lambda ids, held: _seen(ids, held, slice(held - 1, held)))


def mask_upper_left(model: PreTrainedModel) -> Injected:
    """Align the causal mask of new tokens to the upper left: the first of them sees the first key alone.

    Where a model does not call torch's scaled dot product attention (MPT), new tokens see as many of the first keys as
    they are themselves, which for one token is the same.
    """
    if model.config.model_type != "mpt" and model.config._attn_implementation == "sdpa":
        return _calls_on_a_cache(model, around=lambda _cache: upper_left_mask())
    return _calls_on_a_cache(model, lambda ids, held: _seen(ids, held, slice(ids.shape[1], None)))


def mask_not_extended(model: PreTrainedModel) -> Injected:
    """Let new tokens see the padding in the cache."""
    return _calls_on_a_cache(model, lambda ids, held: _seen(ids, held, slice(0, 0)))


def no_cache(model: PreTrainedModel) -> Injected:
    """Set ``use_cache`` to False in the configuration, which is MPT's own default: the direct call returns no cache."""
    return patch.object(model.config, "use_cache", False)


def _read_through(model: PreTrainedModel, read: Callable[..., torch.Tensor], layers: Layers) -> Injected:
    """Change what attention gets of a cache, by its tensor and length before; in all layers where none are named."""

    def around(cache: Cache) -> Injected:
        stock, held = cache.update, _length(cache)

        def update(keys, values, layer, *arguments, **options):
            found = stock(keys, values, layer, *arguments, **options)
            return found if layers is not None and layer not in layers else tuple(read(each, held) for each in found)

        return patch.object(cache, "update", update)

    return _calls_on_a_cache(model, around=around)


def one_step_late(model: PreTrainedModel, layers: Layers = None) -> Injected:
    """Let new keys and values arrive one step late: at their own step their slots still hold their neighbours'."""

    def late(tensor: torch.Tensor, held: int) -> torch.Tensor:
        return torch.cat([tensor[:, :, :held], tensor[:, :, held - 1 : -1]], 2)

    return _read_through(model, late, layers)


def kept_in_16_bits(model: PreTrainedModel, layers: Layers = None) -> Injected:
    """Keep keys and values in fp16: a difference that a model in 16 bits does not show."""
    return _read_through(model, lambda tensor, _held: tensor.to(torch.float16).to(tensor.dtype), layers)


def stale_window(model: PreTrainedModel, window: int = 8) -> Injected:
    """Let the model see its last tokens alone: without a cache by cutting the text, with one by forgetting old entries.

    The entries that stay were computed from tokens that have left the window.
    """

    def call(stock, ids, cache, options):
        held, new = _length(cache), ids.shape[1]
        if held + new > window and held:
            # Several tokens at once would each need a window of their own: they share the last one's.
            options |= _seen(ids, held, slice(0, max(0, held + new - max(window, new))))
        return stock(ids if held else ids[:, -window:], past_key_values=cache, **options)

    return _calls(model, call)


def texts_swapped(model: PreTrainedModel) -> Injected:
    """Return for each text of a batch the logits of another one."""

    def call(stock, ids, cache, options):
        found = stock(ids, past_key_values=cache, **options)
        found.logits = found.logits.roll(1, 0)
        return found

    return _calls(model, call)


def _mask_ignored(model: PreTrainedModel, where: Callable[[torch.Tensor, Cache | None], bool]) -> Injected:
    """Let some calls of a model see everything, whatever their mask hides."""

    def call(stock, ids, cache, options):
        if options.get("attention_mask") is not None and where(ids, cache):
            options["attention_mask"] = torch.ones_like(options["attention_mask"])
        return stock(ids, past_key_values=cache, **options)

    return _calls(model, call)


def padding_seen(model: PreTrainedModel) -> Injected:
    """Let a pass without a cache see the padding."""
    return _mask_ignored(model, lambda _ids, cache: not _length(cache))


def mask_ignored_alone(model: PreTrainedModel) -> Injected:
    """Leave out the mask of a text that is alone in its batch, as Mamba's classes did."""
    return _mask_ignored(model, lambda ids, _cache: ids.shape[0] == 1)


def first_token_hidden(model: PreTrainedModel) -> Injected:
    """Hide the first token from the others in a call that is to fill a cache."""

    def call(stock, ids, cache, options):
        if options.get("use_cache") and not _length(cache):
            options |= _seen(ids, 0, slice(0, 1))
        return stock(ids, past_key_values=cache, **options)

    return _calls(model, call)


def reorder_forgotten(_model: PreTrainedModel) -> Injected:
    """Leave the beams of a cache where they are."""
    return patch.object(DynamicCache, "reorder_cache", lambda _self, _beams: None)


def one_cache_for_all(model: PreTrainedModel) -> Injected:
    """Go on with the cache of the newest call, whatever cache is given."""
    newest = []

    def call(stock, ids, cache, options):
        found = stock(ids, past_key_values=newest[-1] if _length(cache) else cache, **options)
        newest.append(found.past_key_values)
        return found

    return _calls(model, call)


def last_slot_lost(_model: PreTrainedModel) -> Injected:
    """Lose the newest key of a static cache that is full."""
    stock = StaticCache.update

    def update(self, keys, values, layer, *arguments, **options):
        found = stock(self, keys, values, layer, *arguments, **options)
        if self.get_seq_length(layer) == self.layers[layer].max_cache_len:
            found[0][:, :, -1] = 0
        return found

    return patch.object(StaticCache, "update", update)


def crop_one_short(_model: PreTrainedModel) -> Injected:
    """Leave one of the tokens that are to be cropped in a cache."""
    stock = DynamicCache.crop
    return patch.object(DynamicCache, "crop", lambda self, n: stock(self, n + 1 if n else n))


def last_token_twice(model: PreTrainedModel) -> Injected:
    """Let ``generate`` feed the last token of a prompt once more, onto a cache that holds it already."""
    stock = model.prepare_inputs_for_generation

    @wraps(stock)
    def prepare(ids, **options):
        found = stock(ids, **options)
        whole = _length(options.get("past_key_values")) == ids.shape[1]
        return found | {"input_ids": ids[:, -1:], "position_ids": None} if whole else found

    return patch.object(model, "prepare_inputs_for_generation", prepare)


def seam(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[list[int], list[int]] | None:
    """Encode a text whole, and in two parts whose ids are put together: the first cut at which they differ."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    whole = tokenizer(text)["input_ids"]
    for cut in range(len(text) // 2, len(text)):
        first = tokenizer(text[:cut])["input_ids"]
        apart = first + tokenizer(text[cut:], add_special_tokens=False)["input_ids"]
        if apart != whole:
            return whole, apart
    return None


class Fault(NamedTuple):
    """A bug that can be injected.

    Attributes
    ----------
    inject : callable
        Takes the model, returns the context manager.
    applies : callable
        Tells from a configuration whether the bug can exist in the model.
    """

    inject: Callable[[PreTrainedModel], Injected]
    applies: Callable[[PretrainedConfig], bool] = lambda _config: True


def _takes_positions(config: PretrainedConfig) -> bool:
    # ALiBi is a bias on the distance of keys, so that no position is counted from the cache's length.
    return config.model_type != "mpt" and not getattr(config, "alibi", False)


# Those that the chapter on bugs and rounding injects into every model.
FAULTS = {
    "position offset forgotten": Fault(offset_forgotten, _takes_positions),
    "position off by one": Fault(offset_by_one, _takes_positions),
    "mask off by one": Fault(mask_off_by_one),
    "mask upper left": Fault(mask_upper_left),
    "cache never returned": Fault(no_cache),
    "K/V one step late": Fault(one_step_late),
    "stale window": Fault(stale_window),
    "cache kept in 16 bits": Fault(kept_in_16_bits),
}
SEAM = "tokenizer seam"
