"""Feeding a model the same tokens along an execution path, whatever its class calls its cache."""

import contextlib
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from kvbook.diagnosis import verdict
from kvbook.diagnosis.outcome import PADDING_COUNTS

# What classes call the cache that they return, and take back under the same name.
_NAMES = ("past_key_values", "cache_params", "state", "past_buckets_states", "mems")


class NoCache(Exception):
    """A class has no such way to be fed; the message says why."""


@dataclass
class Fed:
    """A model that can be fed in parts.

    Attributes
    ----------
    model : PreTrainedModel
        The model.
    name : str or None
        What its class calls the cache; None where none comes back.
    kind : str
        Class of the cache; "none" without one.
    """

    model: PreTrainedModel
    name: str | None
    kind: str


def look_at(model: PreTrainedModel, ids: torch.Tensor) -> Fed:
    """Find out what a model's cache is called and what it is, on a few tokens."""
    taken = inspect.signature(model.forward).parameters
    try:
        output = model(ids, use_cache=True)
    except Exception as error:
        # Some class may run without a cache and not with one.
        model(ids, use_cache=False)
        return Fed(model, None, f"raises {type(error).__name__}")
    # An empty cache that a class passes through is none.
    name = next((name for name in _NAMES if output.get(name) is not None and name in taken), None)
    kind = "none" if name is None else type(output[name]).__name__
    return Fed(model, name, kind)


def agree(fed: Fed, expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Tell whether two passes differ by rounding at most, in the model's dtype: some classes give fp32 logits in any."""
    coarser = max(expected.dtype, fed.model.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return verdict.is_small(verdict.drift_between(expected, found), coarser)


def full(fed: Fed, ids: torch.Tensor, **options: torch.Tensor | int) -> torch.Tensor:
    """Give the logits of one pass without a cache, shape (rows, seq_len, vocabulary)."""
    return fed.model(ids, use_cache=False, **options).logits


def in_parts(fed: Fed, ids: torch.Tensor, sizes: list[int], cache: object = None) -> tuple[torch.Tensor, object]:
    """Feed tokens part by part on top of a cache."""
    if fed.name is None:
        # Where a cache cannot even be asked for, this raises the error again.
        fed.model(ids, use_cache=True)
        raise NoCache("no cache is returned")
    parts = []
    for part in ids.split(sizes, 1):
        given = {} if cache is None else {fed.name: cache}
        output = fed.model(part, use_cache=True, **given)
        cache = output[fed.name]
        parts.append(output.logits)
    return torch.cat(parts, 1), cache


def static(fed: Fed, ids: torch.Tensor, sizes: list[int], max_cache_len: int) -> torch.Tensor:
    """Feed a static cache."""
    if fed.name is None or not fed.kind.endswith("DynamicCache"):
        raise NoCache(f"takes no StaticCache: its cache is {fed.kind}")
    cache = StaticCache(config=fed.model.config, max_cache_len=max_cache_len)
    return in_parts(fed, ids, sizes, cache)[0]


def in_batch(fed: Fed, ids: torch.Tensor) -> torch.Tensor:
    """Run a text at once, as the middle one of three."""
    return full(fed, torch.cat([ids.flip(1), ids, ids.roll(1, 1)]))[1:2]


def left_padded(fed: Fed, ids: torch.Tensor, padding: int) -> torch.Tensor:
    """Feed the padded text with positions from the first real token, or as the class finds them by itself.

    Classes of absolute positions count the padding, or know it by its id; each is given what it expects, if anything
    is.
    """
    padded, mask = _with_padding(fed, ids, padding)
    expected = full(fed, ids)
    found = [full(fed, padded, attention_mask=mask)]
    # Some classes hand them on without naming them.
    with contextlib.suppress(TypeError):
        found.append(full(fed, padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)))
    found = [logits[:, padding:] for logits in found]
    return min(found, key=lambda logits: (logits - expected).abs().max().nan_to_num(torch.inf).item())


def left_padded_in_parts(fed: Fed, ids: torch.Tensor, padding: int, sizes: list[int]) -> torch.Tensor:
    """Feed a padded text part by part onto a cache, its mask and its positions growing with it, as ``generate`` does.

    Some classes count positions from the mask by themselves, or begin behind the padding's id; those without positions
    want the mask in the first call alone.  Each is given what it expects, if anything is.
    """
    if fed.name is None:
        # Says why there is none.
        in_parts(fed, ids, sizes)
    padded, mask = _with_padding(fed, ids, padding)
    expected = full(fed, ids)
    if not agree(fed, expected, left_padded(fed, ids, padding)):
        raise NoCache(PADDING_COUNTS)
    stops = list(itertools.accumulate([0, padding + sizes[0], *sizes[1:]]))

    def feed(places: torch.Tensor | None, masked: int = len(sizes)) -> torch.Tensor:
        parts, cache = [], None
        for number, (start, stop) in enumerate(itertools.pairwise(stops)):
            given: dict[str, Any] = {} if cache is None else {fed.name: cache}
            if number < masked:
                given["attention_mask"] = mask[:, :stop]
            if places is not None:
                given["position_ids"] = places[:, start:stop]
            output = fed.model(padded[:, start:stop], use_cache=True, **given)
            cache = output[fed.name]
            parts.append(output.logits)
        return torch.cat(parts, 1)[:, padding:]

    tried = [feed(None)]
    if "position_ids" not in inspect.signature(fed.model.forward).parameters:
        tried.append(feed(None, masked=1))
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    # Some classes hand them on without naming them.
    with contextlib.suppress(TypeError):
        behind = (getattr(fed.model.config.get_text_config(), "pad_token_id", None) or 0) + 1
        tried += [feed(places), feed(places + behind)]
    return min(tried, key=lambda logits: verdict.drift_between(expected, logits))


def _with_padding(fed: Fed, ids: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the padded text, and its mask."""
    if "attention_mask" not in inspect.signature(fed.model.forward).parameters:
        raise NoCache("takes no attention mask")
    padded = torch.cat([ids.new_zeros(1, padding), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :padding] = 0
    return padded, mask


def cropped(fed: Fed, ids: torch.Tensor, at: int, wrong: int) -> torch.Tensor:
    """Feed a few wrong tokens after so many right ones, crop them away, and go on."""
    if not fed.kind.endswith("DynamicCache"):
        raise NoCache(f"cannot be cropped: its cache is {fed.kind}")
    cache = DynamicCache(config=fed.model.config)
    first, cache = in_parts(fed, ids[:, :at], [at], cache)
    if not all(getattr(layer, "is_croppable", True) for layer in cache.layers):
        raise NoCache("cannot be cropped: it holds a recurrent state")
    cache.activate_past_recording()
    in_parts(fed, ids[:, :wrong], [wrong], cache)
    cache.crop(-wrong)
    rest = ids[:, at:]
    parts = [first]
    for part in rest.split(3, 1):
        parts.append(in_parts(fed, part, [part.shape[1]], cache)[0])
        cache.crop(0)
    return torch.cat(parts, 1)


def held(cache: object) -> int | None:
    """Give how many tokens a cache holds; None where it does not count them, as one of recurrent states alone."""
    try:
        return int(cache.get_seq_length()) if isinstance(cache, Cache) else None
    except ValueError:
        return None


def onto_its_own_prompt(fed: Fed, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Let ``generate`` write a token after a prompt that the cache holds whole; give how many tokens it fed, too.

    Of the logits the last are those that ``generate`` chose by, and the others those of the pass that filled the cache.
    """
    if fed.name is None or not fed.kind.endswith("DynamicCache"):
        raise NoCache(f"takes no filled cache in generate: its cache is {fed.kind}")
    filled, cache = in_parts(fed, ids, [ids.shape[1]])
    counts: list[int] = []
    hook = fed.model.register_forward_pre_hook(
        lambda _, __, given: counts.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        written = fed.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, num_beams=1,
                output_logits=True,
            return_dict_in_generate=True, **{fed.name: cache},
        )
    finally:
        hook.remove()
    return torch.cat([filled[:, :-1], written.logits[0][:, None]], 1), counts[0]
