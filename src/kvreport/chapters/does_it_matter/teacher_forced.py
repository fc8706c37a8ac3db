"""The same texts, token by token, by every way that is one change away from the baseline: how far the predictions move.

A second experiment holds caches of few bits on the same texts: the library's own, by backend, bits and groups, and keys
or values alone.  The first half of a text fills the cache, which quantizes it; the second half is scored on top of it
in one piece.  A backend of the library's needs a package of its own, and is left out where that is missing: ``pip
install optimum-quanto`` or ``pip install hqq``.

Rows of both, one a (model, dtype, way, sample, position): see ``data/README.md``.  Those of the second have what
`stored` tells of the cache too, and lack what no table shows.
"""

import importlib.metadata
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from transformers import Cache, PretrainedConfig, QuantizedCache
from transformers.cache_utils import BaseQuantizedLayer, Fp8QuantizedLayer, HQQQuantizedLayer, QuantoQuantizedLayer

from kvbook import progress
from kvbook.measuring import predictions
from kvbook.measuring.rounded_caches import RoundedLayer
from kvbook.models import corpus
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer
from kvreport.chapters.does_it_matter import DoesItMatterSettings, classifier, variants
from kvreport.chapters.does_it_matter import rows as named

# In a scale's place: these numbers are not rounded.
_UNSCALED = "as they are"
_PACKAGES = ("optimum-quanto", "hqq")
_UNUSED = ("nll", "margin", "shift", "ulp", "decision_flip", "decision_right")


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    longest = settings.n_tokens + max(variants.PADS)
    # One token more than is read: the last position's next one.
    return variants.inputs(settings, longest, settings.n_samples, settings.n_tokens + 1)


def measure(
    settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer,
    ways: tuple[variants.Variant, ...] = variants.VARIANTS, of_cache: Callable[[Cache | None], Row] = lambda _: {},
    without: Collection[str] = (),
) -> None:
    """Score the texts in every way; rows also say what `of_cache` tells of a way's cache, and lack some columns."""
    samples = variants.texts(settings, settings.n_samples, settings.n_tokens + 1)
    first = variants.Subject(settings, settings.dtypes[0]).baseline
    head = classifier.fit(first.model, first.tokenizer, classifier.fitting_texts(settings, first.tokenizer))
    for dtype in settings.dtypes:
        subject = variants.Subject(settings, dtype)
        units = {f"{dtype}|{number}": group for number, group in enumerate(variants.groups(samples))}
        for unit, group in writer.pending(units, f"does it matter, {dtype}: group"):
            rows = score(subject, group, head, ways, of_cache)
            writer.keep(unit, subject.about, ({name: row[name] for name in row if name not in without} for row in rows))


def score(
    subject: variants.Subject, samples: list[corpus.Sample], head: torch.Tensor, ways: tuple[variants.Variant, ...],
    of_cache: Callable[[Cache | None], Row],
) -> Rows:
    """Hold every way against the baseline on some texts; the logits live no longer than the comparison."""
    whole = subject.tensor([sample.ids for sample in samples])
    ids, targets = whole[:, :-1], whole[:, 1:]
    half = ids.shape[1] // 2
    baseline = list(variants.whole(subject.baseline.model, ids, half))
    decisions = [classifier.decisions(piece.hidden, head) for piece in baseline]
    labels = [classifier.labels(subject.baseline.tokenizer, sample.ids)[:-1] for sample in samples]
    right = [decided.cpu().numpy() == label for decided, label in zip(decisions, labels, strict=True)]
    for way in progress.track(variants.possible(subject.baseline.model, ways), label="way"):
        for piece in subject.pieces(way, ids, half):
            text, first = piece.text, max(half, piece.start)
            logits, hidden = (of[first - piece.start :] for of in (piece.logits, piece.hidden))
            rows = slice(first, first + len(logits))
            compared = predictions.compare(baseline[text].logits[rows], logits, targets[text, rows])
            flips = decisions[text][rows] != classifier.decisions(hidden, head)
            about = {"way": way.name, "sample": samples[text].index, "source": samples[text].source}
            about |= of_cache(piece.cache)
            for position, row, flip in zip(range(first, rows.stop), compared.rows(), flips.tolist(), strict=True):
                yield about | {"position": position} | row | {
                    "decision_flip": int(flip), "decision_right": int(right[text][position])
                }


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    half = settings.n_tokens // 2
    n_steps = settings.n_samples * half * (1 + 2 / variants.AT_ONCE)
    # Copies of other dtypes, attention and quantizations stay loaded beside the baseline; as much was seen at the peak.
    return Work(settings.n_tokens, len(variants.VARIANTS) * settings.n_samples, n_steps, settings.dtypes, copies=6)


EXPERIMENT = Experiment(
    "teacher_forced", DoesItMatterSettings, inputs, measure,
    fields=variants.FIELDS | {"n_samples", "n_tokens", "n_fit"}, work=work,
)


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


def inputs_of_quantized(settings: DoesItMatterSettings) -> Inputs:
    """Name the model, the corpus and the backends' packages, and refuse what cannot be run."""
    return inputs(settings) | {"packages": dict(_installed())}


def _installed() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def measure_quantized(settings: DoesItMatterSettings, made_of: Inputs, writer: Writer) -> None:
    """Score the texts on every cache."""
    measure(settings, made_of, writer, tuple(ways()), stored, _UNUSED)


QUANTIZED = Experiment(
    "quantized_caches", DoesItMatterSettings, inputs_of_quantized, measure_quantized, fields=EXPERIMENT.fields,
    revision=2, work=Work.per_text(passes=1 + len(list(ways()))),
)
