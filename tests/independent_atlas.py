"""Tiny models of causal architectures by rules of their own, to try the atlas from outside.

Nothing of `kvbook.atlas` is used: other sizes, other weights, other texts, another way to find the cache.
"""

import dataclasses
import inspect
import re
from contextlib import suppress
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbook.exact import row_invariant
from kvbook.measuring.in_fp64 import widened

# By the names that transformers gives every configuration, whatever its own are.
_COMMON = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 200,
    "head_dim": 12,
}
# What a number is at most, by words of its name; the first that fit.
_MOST = {
    "_id$|_index$": 5, "window|chunk": 6, "(?<!key_value_)heads$": 4, "^rotary_dim$": 8, "per_tok|top_?k": 2,
    "expert": 8,
}
# The first number of layers that a class takes: some want pairs, or a layer that attends.
_LAYERS = (5, 4, 6, 3, 12, 24)
_LARGEST = 20e6
LENGTH = 19
# Beyond it in fp64 a difference, over the spread of the logits, is no rounding.
WRONG = 1e-10
_PADDING = 2


class NotBuilt(Exception):
    """These rules make no model of an architecture that runs."""


def _shrunk(kind: type[PreTrainedConfig], layers: int) -> PreTrainedConfig:
    default = kind()
    fields = {field.name for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for name in fields:
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig):
            given[name] = _shrunk(type(value), layers)
        elif name == "attention_types":
            given[name] = [[value[0][0], layers // len(value[0][0])]]
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif limits := [most for words, most in (_MOST | {"layers": layers}).items() if re.search(words, name)]:
            if value > limits[0]:
                given[name] = limits[0]
        elif value >= 512 and "position" not in name and "max" not in name:
            given[name] = value // 32
    for common, size in (_COMMON | {"num_hidden_layers": layers}).items():
        name = kind.attribute_map.get(common, common)
        if name in fields and isinstance(getattr(default, name, None), int):
            given[name] = size
    if "kv_lora_rank" in fields:
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    if "is_decoder" in fields:
        given["is_decoder"] = True
    return kind(**given)


def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model of the first number of layers with which its class runs.

    Raises
    ------
    NotBuilt
        Where there is none.
    """
    for layers in _LAYERS:
        with suppress(Exception):
            return _built(name, dtype, layers)
    raise NotBuilt(name)


def _built(name: str, dtype: torch.dtype, layers: int) -> PreTrainedModel:
    """Spread the weights so that every layer counts; experts run one after the other, as they do in any dtype."""
    config = _shrunk(CONFIG_MAPPING[name], layers)
    with torch.device("meta"):
        if AutoModelForCausalLM.from_config(config).num_parameters() > _LARGEST:
            raise NotBuilt("too large")
    torch.manual_seed(11)
    with widened(dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(12)
    for weight in model.requires_grad_(False).parameters():
        if weight.dim() > 1:
            weight.copy_(torch.empty(weight.shape).uniform_(-0.2, 0.2, generator=generator))
        elif not weight.isfinite().all():
            weight.fill_(0.5)
    with torch.inference_mode(), widened(dtype):
        logits = model(_text(), use_cache=False).logits
        if not logits.isfinite().all() or logits.std() < 1e-3:
            raise NotBuilt("its logits are of no use")
        if layers != _LAYERS[-1]:
            # A state space without a layer that attends may run without a cache alone: then with more layers.
            model(_text(), use_cache=True)
    return model


def _text() -> torch.Tensor:
    return torch.tensor([[(37 * i * i + 11 * i + 20) % 170 + 20 for i in range(LENGTH)]])


def _parts(
    model: PreTrainedModel, ids: torch.Tensor, sizes: list[int], mask: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Feed part by part, handing on whatever the model gives that it also takes; None where it gives nothing."""
    takes = inspect.signature(model.forward).parameters
    held: dict[str, Any] = {}
    logits, end = [], 0
    for part in ids.split(sizes, 1):
        begin, end = end, end + part.shape[1]
        given = {} if mask is None else {"attention_mask": mask[:, :end], "position_ids": places[:, begin:end]}
        output = model(part, use_cache=True, **given, **held)
        held = {key: value for key, value in output.items() if key in takes and key != "logits" and value is not None}
        if not held:
            return None
        logits.append(output.logits)
    return torch.cat(logits, 1)


def _behind_padding(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor | None:
    """Feed one prompt and single tokens behind two masked ones; None where such a text fed whole has other logits."""
    takes = inspect.signature(model.forward).parameters
    if not {"attention_mask", "position_ids"} <= takes.keys():
        return None
    padded = torch.cat([torch.full((1, _PADDING), 3), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= _PADDING).long()[None]
    places = (torch.arange(padded.shape[1]) - _PADDING).clamp(min=0)[None]
    whole = model(padded, attention_mask=mask, position_ids=places, use_cache=False).logits[:, _PADDING:]
    alone = model(ids, use_cache=False).logits
    # As wide as in fp64, in roundoffs.
    limit = WRONG / torch.finfo(torch.float64).eps * torch.finfo(alone.dtype).eps
    if not (whole - alone).double().abs().max() < limit * alone.double().std():
        return None
    fed = _parts(model, padded, [9] + [1] * (padded.shape[1] - 9), mask, places)
    return None if fed is None else fed[:, _PADDING:]


def _static(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor | None:
    """Feed two parts to a static cache with places to spare; None where a class returns another kind of cache."""
    if not isinstance(model(ids, use_cache=True).get("past_key_values"), DynamicCache):
        return None
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 5)
    return torch.cat([model(part, use_cache=True, past_key_values=cache).logits for part in ids.split(11, 1)], 1)


PATHS = {
    "static cache": _static,
    "behind padding": _behind_padding,
    "steps": lambda model, ids: _parts(model, ids, [3] + [1] * (LENGTH - 3)),
    "two parts": lambda model, ids: _parts(model, ids, [11, LENGTH - 11]),
    "batch": lambda model, ids: model(torch.cat([ids, ids.flip(1)]), use_cache=False).logits[:1],
}


def _found(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Feed on every path, and leave out those that give nothing, are refused, or end with an error."""
    found = {}
    for path, feed in {"full": lambda model, ids: model(ids, use_cache=False).logits, **PATHS}.items():
        with suppress(Exception):
            found[path] = feed(model, _text())
    return {path: logits for path, logits in found.items() if logits is not None}


def try_out(name: str) -> dict[str, Any]:
    """Try an architecture in fp64, which tells a wrong cache from rounding.

    Returns
    -------
    dict
        ``wrong``: paths that differ by more than rounding.  ``causal``: whether what follows changes what came before.
        ``tried``: paths.

    Raises
    ------
    NotBuilt
        Where these rules make no model.
    """
    with torch.inference_mode(), widened(torch.float64):
        model = build(name, torch.float64)
        tried = _found(model)
        full = tried.pop("full")
        shorter = model(_text()[:, :-4], use_cache=False).logits
    limit = WRONG * full.std()
    causal = bool((full[:, :-4] - shorter).abs().max() < limit)
    wrong = [path for path, logits in tried.items() if not (logits - full).abs().max() < limit]
    return {"wrong": wrong, "causal": causal, "tried": sorted(tried)}


def under_the_switch(name: str, one: dict[str, Any]) -> dict[str, Any]:
    """Try an architecture under row-invariant arithmetic, on the paths that `try_out` did not find wrong.

    Returns
    -------
    dict
        ``silent``: paths that differ, with the dtype.  ``compared``: on how many there were logits, in either dtype.
    """
    silent, compared = [], 0
    for dtype in (torch.float32, torch.bfloat16):
        with torch.inference_mode(), suppress(NotBuilt):
            model = build(name, dtype)
            with row_invariant():
                found = _found(model)
            paths = found.keys() & (set(one["tried"]) - set(one["wrong"])) if "full" in found else ()
            compared += len(paths)
            differ = (path for path in paths if not torch.equal(found["full"], found[path]))
            silent += [f"{path}, {str(dtype).removeprefix('torch.')}" for path in differ]
    return {"silent": silent, "compared": compared}
