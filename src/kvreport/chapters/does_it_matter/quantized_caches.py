"""Caches of few bits on the same texts: the library's own, by backend, bits and groups, and keys or values alone.

The first half of a text fills the cache, which quantizes it; the second half is scored on top of it in one piece.  A
backend of the library's needs a package of its own, and is left out where that is missing: ``pip install
optimum-quanto`` or ``pip install hqq``.  Rows as those of `teacher_forced`, with what `stored` tells of the cache
and without what no table shows.
"""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache, PretrainedConfig, QuantizedCache
from transformers.cache_utils import BaseQuantizedLayer, Fp8QuantizedLayer, HQQQuantizedLayer, QuantoQuantizedLayer

from kvbook.measuring.rounded_caches import RoundedLayer
from kvbook.runs import Experiment, Inputs, Row, Work, Writer
from kvreport.chapters.does_it_matter import DoesItMatterSettings, teacher_forced, variants
from kvreport.chapters.does_it_matter import rows as named

# In a scale's place: these numbers are not rounded.
_UNSCALED = "as they are"
_PACKAGES = ("optimum-quanto", "hqq")
_UNUSED = ("nll", "margin", "shift", "ulp", "decision_flip", "decision_right")


class _OneSided:
    """Ours: a layer of the library's that keeps its keys, or its values, as they are."""

    def __init__(self, exact: str, **options: int) -> None:
        super().__init__(**options)
        # `update` hands each side's axis on to what quantizes it.
        setattr(self, f"axis_{exact}", None)

    def _quantize(self, tensor: torch.Tensor, axis: int | None) -> Any:
        return tensor if axis is None else super()._quantize(tensor, axis)

    def _dequantize(self, held: Any) -> torch.Tensor:
        return held if type(held) is torch.Tensor else super()._dequantize(held)


class OneSidedQuantoLayer(_OneSided, QuantoQuantizedLayer):
    """Ours: quanto's layer, keys or values alone."""


class OneSidedHQQLayer(_OneSided, HQQQuantizedLayer):
    """Ours: HQQ's layer, keys or values alone."""


class OneSidedFp8Layer(Fp8QuantizedLayer):
    """Ours: the fp8 layer, keys or values alone."""

    def __init__(self, exact: str) -> None:
        super().__init__()
        self._exact = exact

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the first tokens."""
        super().lazy_initialization(key_states, value_states)
        # A side's scale is handed on to what rounds it.
        states = {"key": key_states, "value": value_states}[self._exact]
        setattr(self, f"_quantized_{self._exact}s", (states, _UNSCALED))

    def _quantize(self, tensor: torch.Tensor, scale: Any = None) -> Any:
        return (tensor, scale) if scale is _UNSCALED else super()._quantize(tensor, scale)

    def _dequantize(self, held: Any) -> torch.Tensor:
        return held[0] if held[1] is _UNSCALED else super()._dequantize(held)


def one_sided(backend: str, exact: str) -> variants.MakeCache:
    """Make caches of a backend of which keys, or values, stay as they are."""
    layer = {"quanto": OneSidedQuantoLayer, "hqq": OneSidedHQQLayer, "fp8": OneSidedFp8Layer}[backend]

    def make(config: PretrainedConfig, _length: int) -> Cache:
        cache = QuantizedCache(backend, config=config)
        cache.layers = [layer(exact) for _ in cache.layers]
        return cache

    return make


def ways() -> Iterator[variants.Variant]:
    """List the caches, the plain one first; it is fed in pieces too, for its drift."""
    makes = {named.PLAIN: variants.dynamic, named.KV_FP8: variants.fp8}
    makes |= {name: variants.library(backend, **options) for name, (backend, options) in named.BACKENDS.items()}
    makes |= {name: one_sided(*which) for name, which in named.ONE_SIDED.items()}
    makes |= {name: variants.rounded(*bits) for name, bits in named.ROUNDED.items()}
    for name, make in makes.items():
        yield variants.Variant(name, variants.on_a_cache(make, None), makes=make)
        if name == named.PLAIN:
            yield variants.CHUNKS


def stored(cache: Cache) -> Row:
    """Count the bits of a number of keys and values in a cache, and the newest tokens that it keeps exact.

    Scales and zero points are counted; the exact tokens are not.  Our rounded caches save nothing: counted is what
    their rule takes.
    """
    layer = cache.layers[0]
    if isinstance(layer, RoundedLayer):
        return {"bits": layer.bits_per_number(), "exact": 0}
    if not isinstance(layer, BaseQuantizedLayer):
        return {"bits": 8 * layer.keys.itemsize, "exact": 0}
    exact = layer.keys.shape[-2] if layer.keys.numel() else 0
    held = layer._quantized_keys, layer._quantized_values
    back = layer._dequantize(held[0])
    return {"bits": 8 * sum(tensor.nbytes for tensor in _tensors(held)) / (2 * back.numel()), "exact": exact}


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    """Find the tensors that a quantized one consists of."""
    if hasattr(held, "__tensor_flatten__"):
        held = [getattr(held, name) for name in held.__tensor_flatten__()[0]]
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict | list | tuple):
        for part in held.values() if isinstance(held, dict) else held:
            yield from _tensors(part)


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model, the corpus and the backends' packages, and refuse what cannot be run."""
    return teacher_forced.inputs(settings) | {"packages": dict(_installed())}


def _installed() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def measure(settings: DoesItMatterSettings, made_of: Inputs, writer: Writer) -> None:
    """Score the texts on every cache."""
    teacher_forced.measure(settings, made_of, writer, tuple(ways()), stored, _UNUSED)


EXPERIMENT = Experiment(
    "quantized_caches", DoesItMatterSettings, inputs, measure, fields=teacher_forced.EXPERIMENT.fields, revision=2,
    work=Work.per_text(passes=1 + len(list(ways()))),
)
