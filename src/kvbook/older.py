"""What older releases of transformers call otherwise or lack, each told by its feature rather than by a version."""

import inspect

from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel, StaticCache, cache_utils


def _takes(what: type, name: str) -> bool:
    return name in inspect.signature(what.__init__).parameters


# What `from_pretrained` and `from_config` call the dtype.
DTYPE = "dtype" if _takes(PretrainedConfig, "dtype") else "torch_dtype"
# Releases on which the atlas has tried row-invariant mode on every architecture, in recorded runs.
TRIED = ("5.23.0",)
# Where an older cache is cropped, its windows have forgotten what came before.
REMEMBERS = hasattr(DynamicCache, "activate_past_recording")


def dynamic_cache(config: PretrainedConfig) -> DynamicCache:
    """Make an empty cache, with windows where a release keeps them apart."""
    return DynamicCache(config=config) if _takes(DynamicCache, "config") else DynamicCache()


def static_cache(model: PreTrainedModel, length: int) -> StaticCache:
    """Make a static cache for one text; an older one wants its shape, place and dtype now."""
    now = {"max_batch_size": 1, "device": model.device, "dtype": model.dtype}
    return StaticCache(
        config=model.config, max_cache_len=length, **now if _takes(StaticCache, "max_batch_size") else {}
    )


def lossless_cache(config: PretrainedConfig) -> Cache | None:
    """Make the library's quantized cache with a quantizer that keeps every bit; None where there is none to make.

    Older releases have no such layer, and a layer that holds more than keys and values has no quantized form.  Four
    tokens stay outside the quantized part, so a text of a few tokens passes through it.
    """
    layer, plain = getattr(cache_utils, "QuantizedLayer", None), ("DynamicLayer", "DynamicSlidingWindowLayer")
    layers = getattr(dynamic_cache(config), "layers", ())
    if layer is None or not layers or not all(type(each).__name__ in plain for each in layers):
        return None
    kept = {"_quantize": lambda _self, tensor, **_axis: tensor.clone(), "_dequantize": lambda _self, tensor: tensor}
    lossless = type("Lossless", (layer,), kept)
    return Cache(layers=[lossless(residual_length=4) for _ in layers])


def promises_static(model: PreTrainedModel) -> bool:
    """Tell whether a class says that it works with a static cache."""
    return bool(getattr(model, "_can_compile_fullgraph", getattr(model, "_supports_static_cache", False)))


def chooses_experts(model: PreTrainedModel) -> bool:
    """Tell whether one can choose how a model's experts are computed."""
    return hasattr(model, "_can_set_experts_implementation") and model._can_set_experts_implementation()


def held(cache: object, fed: int) -> int:
    """Count the tokens of a cache; before there were classes of caches, each layer's keys and values made a pair.

    A recurrent state does not count: it is taken to hold what was fed.
    """
    if isinstance(cache, tuple):
        return cache[0][0].shape[-2]
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):
        return fed
