"""Ways to compute the same rows, each a change or two away from the same baseline.

The baseline reads one text in one pass, without a cache.  Of every text the first half is a prompt and the second half
is scored, so each scored row of a cached way is computed on top of a cache.  Texts share a pass only in the batched
ways, which ask what that changes, and where a path is written that all ways are then held against.

Rounding: the arithmetic's order or shape changes and nothing else does.  Another dtype: the model computes in it.
Fewer bits: what is stored has fewer.  Control: an injected fault, to show what a broken cache looks like on the same
axes.  Rounded and faulty caches are caches as well, so they are two changes away; what is scored is fed to them in one
piece.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import Cache, PretrainedConfig, PreTrainedModel, QuantizedCache
from transformers.pytorch_utils import Conv1D

from kvbook import UserError
from kvbook.measuring import caches, rounded_caches
from kvbook.models import corpus, loading, lowbit, placement
from kvbook.runs import Inputs, Rows, Writer, samples
from kvreport.chapters.does_it_matter import DoesItMatterSettings
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter.rows import AT_ONCE, BATCH

# Left padding of the texts of a batch: none is padded as far as its neighbour.
PADS = tuple(1 + 3 * index for index in range(BATCH))


class Piece(NamedTuple):
    """Some rows of one text.

    Attributes
    ----------
    text : int
        Which of the texts that were fed.
    start : int
        Position of the first row.
    logits : Tensor, shape (rows, vocabulary_size)
        Of the token behind each position.
    hidden : Tensor, shape (rows, width)
        What the output head read.
    cache : Cache, optional
        What holds the text so far.
    """

    text: int
    start: int
    logits: torch.Tensor
    hidden: torch.Tensor
    cache: Cache | None = None


def read(model: PreTrainedModel, ids: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a model: its logits, and what its output head read, one row a token fed."""
    # Asking for the hidden states of all layers costs a third of a decode step of a small model; the last ones pass
    # through the head's hands anyway.
    passed: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _head, inputs: passed.append(inputs[0]))
    try:
        return model(ids, **options).logits, passed.pop()
    finally:
        hook.remove()


Feed = Callable[[PreTrainedModel, torch.Tensor, int], Iterator[Piece]]
MakeCache = Callable[[PretrainedConfig, int], Cache]


class Variant(NamedTuple):
    """One change.

    Attributes
    ----------
    name : str
        As figures and tables show it; `rows.KINDS` says what the difference is made of.
    feed : callable
        Takes the model, the ids of shape (texts, tokens) and the prompt's length; yields pieces, which together hold
        every row from the prompt's length on.
    attention : str, optional
        transformers' attention implementation.
    quantization : {"none", "8bit", "4bit"}
        Of the weights.
    other_dtype : bool
        Whether the model computes in another dtype: bf16 where the baseline is fp32, fp32 where it is not.
    makes : callable, optional
        Makes the cache, given the configuration and a length, where not every model or machine has it.
    """

    name: str
    feed: Feed
    attention: str | None = None
    quantization: str = "none"
    other_dtype: bool = False
    makes: MakeCache | None = None


def whole(model: PreTrainedModel, ids: torch.Tensor, _prompt: int) -> Iterator[Piece]:
    """Read each text alone, in one pass without a cache: the baseline."""
    for text in range(len(ids)):
        logits, hidden = read(model, ids[text : text + 1], use_cache=False)
        yield Piece(text, 0, logits[0], hidden[0])


def _filled(ids: torch.Tensor) -> torch.Tensor:
    """Take a batch of exactly `BATCH` texts, copies of the first ones where there are fewer."""
    return ids[torch.arange(BATCH, device=ids.device) % len(ids)]


def batched(model: PreTrainedModel, ids: torch.Tensor, _prompt: int) -> Iterator[Piece]:
    """Read `BATCH` texts of one length in one pass without a cache."""
    for group, some in enumerate(ids.split(BATCH)):
        logits, hidden = read(model, _filled(some), use_cache=False)
        yield from (Piece(group * BATCH + row, 0, logits[row], hidden[row]) for row in range(len(some)))


def positions(model: PreTrainedModel, places: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the option that tells a model where tokens stand; MPT counts from the query and takes none."""
    return {} if model.config.model_type == "mpt" else {"position_ids": places}


def left_padded(model: PreTrainedModel, ids: torch.Tensor, _prompt: int) -> Iterator[Piece]:
    """Read `BATCH` texts in one pass, each behind another number of padding tokens that the mask hides."""
    length = ids.shape[1]
    # Places in the text without padding. All are as long, so a text that is padded by less ends before the row does;
    # what is behind it is hidden too.
    places = torch.arange(max(PADS) + length, device=ids.device) - torch.tensor(PADS, device=ids.device)[:, None]
    inside, places = (places >= 0) & (places < length), places.clamp(0, length - 1)
    for group, some in enumerate(ids.split(BATCH)):
        full = _filled(some)
        # Any token will do behind the mask; one of the text's own has an embedding like all others.
        padded = full.gather(1, places).where(inside, full[:, :1])
        options = {"attention_mask": inside.long(), "use_cache": False} | positions(model, places)
        logits, hidden = read(model, padded, **options)
        for row, pad in enumerate(PADS[: len(some)]):
            text = slice(pad, pad + length)
            yield Piece(group * BATCH + row, 0, logits[row, text], hidden[row, text])


dynamic, static = (functools.partial(caches.make, kind) for kind in ("dynamic", "static"))


def on_a_cache(make: MakeCache, at_once: int | None, lost: int = 0) -> Feed:
    """Feed the prompt into a cache, then the rest on top of it."""

    def feed(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> Iterator[Piece]:
        for text in range(len(ids)):
            one = ids[text : text + 1]
            cache = make(model.config, ids.shape[1])
            model(one[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
            if lost:
                cache.crop(-lost)
            start = prompt
            for part in one[:, prompt:].split(at_once or ids.shape[1], 1):
                logits, hidden = read(model, part, past_key_values=cache, use_cache=True)
                yield Piece(text, start, logits[0], hidden[0], cache)
                start += part.shape[1]

    return feed


def library(backend: str, **options: int) -> MakeCache:
    """Make the library's quantized caches; some backends take a package of their own."""
    return lambda config, _length: QuantizedCache(backend, config=config, **options)


def rounded(keys: int | None, values: int | None) -> MakeCache:
    """Make caches that round keys and values to so many bits each."""
    return lambda config, _length: rounded_caches.make(config, keys, values)


# For it nothing need be installed.
fp8 = library("fp8")

(
    _, CHUNKS, _, BATCHED, PADDED, EAGER, OTHER_DTYPE, KV_FP8, KV_INT8, KV_INT4, WEIGHTS_8, WEIGHTS_4, LOST
) = VARIANTS = (
    Variant(named.CACHED, on_a_cache(dynamic, 1)), Variant(named.CHUNKS, on_a_cache(dynamic, AT_ONCE)),
    Variant(named.STATIC, on_a_cache(static, AT_ONCE)), Variant(named.BATCHED, batched),
    Variant(named.PADDED, left_padded), Variant(named.EAGER, whole, attention="eager"),
    Variant(named.OTHER_DTYPE, whole, other_dtype=True), Variant(named.KV_FP8, on_a_cache(fp8, None), makes=fp8),
    Variant(named.KV_INT8, on_a_cache(rounded(8, 8), None)), Variant(named.KV_INT4, on_a_cache(rounded(4, 4), None)),
    Variant(named.WEIGHTS_8, whole, quantization="8bit"), Variant(named.WEIGHTS_4, whole, quantization="4bit"),
    Variant(named.FAULT, on_a_cache(dynamic, None, lost=1)),
)


# bitsandbytes' 4-bit product on a CPU takes rows of whole blocks of this many numbers.
_BLOCK_4BIT = 64


def possible(model: PreTrainedModel, ways: tuple[Variant, ...] = VARIANTS) -> list[Variant]:
    """List the ways that a model has.

    Left out are a second attention where it knows one only; caches that are rounded, or cut back, where a layer has a
    window; those that cannot be made, as where transformers is older than the fp8 cache or a backend's package is
    missing; quantized weights without the library; and on a CPU 4-bit weights of odd widths.
    """
    without = set()
    if model.config._attn_implementation == "eager":
        without.add(EAGER)
    if not rounded_caches.all_full(model.config):
        without |= {KV_FP8, KV_INT8, KV_INT4, LOST}
    without |= {way for way in ways if way.makes and not _can_make(way.makes, model.config)}
    products = (module for module in model.base_model.modules() if isinstance(module, nn.Linear | Conv1D))
    widths = (of.in_features if isinstance(of, nn.Linear) else of.weight.shape[0] for of in products)
    if model.device.type == "cpu" and any(width % _BLOCK_4BIT for width in widths):
        without.add(WEIGHTS_4)
    try:
        lowbit.check(WEIGHTS_8.quantization)
    except UserError:
        without |= {WEIGHTS_8, WEIGHTS_4}
    return [way for way in ways if way not in without]


def _can_make(makes: MakeCache, config: PretrainedConfig) -> bool:
    try:
        makes(config, 1)
    except (ValueError, ImportError, UserError):
        return False
    return True


class Subject:
    """One model in one dtype, with the variants of it that a way asks for, each loaded when it is first wanted.

    All stay loaded: the baseline's logits are compared while they are there, and never computed twice.

    Parameters
    ----------
    settings : DoesItMatterSettings
        Which model, where.
    dtype : str
        Of the baseline.
    """

    def __init__(self, settings: DoesItMatterSettings, dtype: str) -> None:
        # A model of its own for another attention too: some classes ignore a switch, and say so in a log only.
        self._load = functools.cache(functools.partial(samples.load, settings, settings.model))
        self.baseline = self._load(dtype, None, "none")
        # What all of its rows say.
        self.about = self.baseline.about

    def pieces(self, way: Variant, ids: torch.Tensor, prompt: int) -> Iterator[Piece]:
        """Run some texts in a way; to be consumed under ``torch.inference_mode``."""
        yield from way.feed(self.model_of(way), ids, prompt)

    def model_of(self, way: Variant) -> PreTrainedModel:
        """Return the model that a way runs."""
        dtype = self.baseline.dtype
        if way.other_dtype:
            dtype = "bfloat16" if dtype == "float32" else "float32"
        return self._load(dtype, way.attention, way.quantization).model

    def tensor(self, ids: list[list[int]]) -> torch.Tensor:
        """Put ids where the model is."""
        return torch.tensor(ids, device=self.baseline.model.device)


def texts(settings: DoesItMatterSettings, n_samples: int, n_tokens: int) -> list[corpus.Sample]:
    """Cut the texts; often one token more than is read."""
    return samples.prompts(settings, settings.corpus, n_samples, n_tokens, "n_tokens or longest")


def follow_all(
    settings: DoesItMatterSettings, writer: Writer, samples: list[corpus.Sample], label: str,
    follow: Callable[[Subject, corpus.Sample], Rows],
) -> None:
    """Follow every text in every dtype; a text is a unit."""
    for dtype in settings.dtypes:
        subject = Subject(settings, dtype)
        units = {f"{dtype}|{sample.index}": sample for sample in samples}
        for unit, sample in writer.pending(units, f"{label}, {dtype}: text"):
            about = subject.about | {"sample": sample.index, "source": sample.source}
            writer.keep(unit, about, follow(subject, sample))


def groups(texts: list[corpus.Sample]) -> list[list[corpus.Sample]]:
    """Put texts into groups that go through a batched way together."""
    return [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]


# The settings on which the rows of all of the chapter's experiments depend.
FIELDS = frozenset({"model", "weights", "device", "seed", "corpus", "dtypes"})


def inputs(settings: DoesItMatterSettings, longest: int, n_samples: int, n_tokens: int) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    placement.check(settings.device, settings.dtypes)
    model = loading.identify(settings.model, settings.weights, settings.seed)
    loading.check_length(model, longest)
    texts(settings, n_samples, n_tokens)
    return {"models": [model], "corpus": corpus.describe(settings.corpus)}
