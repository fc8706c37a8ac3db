"""Planted bugs, clean families, and what the five documents ran, each at several unit roundoffs.

Rows, one a (model, dtype, document, symptom, text): see ``data/README.md``.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvbook import lengths
from kvbook.diagnosis import faults, probe
from kvbook.measuring import caches
from kvbook.measuring.in_fp64 import widened
from kvbook.models import corpus, loading
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvbook.runs.work import Work
from kvreport.chapters.blog_past import past_tables
from kvreport.chapters.blog_past.rows import AS_IN_2023
from kvreport.chapters.bug_or_rounding import every_dtype
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.from_scratch import logits as scratch_logits
from kvreport.chapters.from_scratch import subject as scratch_subject
from kvreport.chapters.from_scratch.gpt.paths import POSTED, WAYS, WINDOW
from kvreport.chapters.from_scratch.settings import ScratchSettings
from kvreport.chapters.prompt_reuse import continuations
from kvreport.chapters.prompt_reuse.rows import DOCUMENTED, JOINED

PLANTED, CLEAN = "planted", "clean"
# A clean model in fp64 with its own conversions to fp32 left in.
NARROW_INSIDE = "clean, fp32 inside"
ISSUE, REUSE, SCRATCH, BLOG, STATIC = "issue-25420", "forum-reuse", "forum-scratch", "blog-past", "notebook-static"

DRIFT, FED_AGAIN = "prefix + last token", "whole text fed again"
KEYS, ANEW, CUT, WHOLE = (
    "first layer's keys", "prefix reused, text encoded anew", "prefix cut to the shared ids",
        "cache as long as the prompt",
)
WITHIN, PAST_BLOCK, REPLY, LAST_ONLY = (
    "rolling cache within the block", "rolling cache past the block", "reply's cache past the block",
        "last character alone fed",
)
BLOG_NAMES = {
    ("gpt2", past_tables.NATIVE): "GPT-2",
    ("roberta", past_tables.NO_PAST): "RoBERTa as posted",
    ("roberta", past_tables.DECODER): "RoBERTa made causal",
    ("roberta", past_tables.HANDED): "RoBERTa, past by hand",
    ("mpt", past_tables.CACHE_OFF): "MPT, use_cache false",
    ("mpt", past_tables.NATIVE): "MPT, use_cache true",
    ("falcon", past_tables.BOTH): "Falcon of mid-2023",
    ("falcon", past_tables.NATIVE): "Falcon today",
}
STATIC_NONE, STATIC_DYNAMIC = "static against no cache", "static against dynamic"

# Blocks of characters behind which the thread's caches are compared.
_BLOCKS = 2
# Tokens of the second part in which the first layer's keys are compared; few, since on CPUs few rows are what differs.
_ROWS = 3
# Everything that is planted, nothing among it.
NAMES = (CLEAN, *faults.FAULTS, faults.SEAM)
# What changes the pass without a cache too.
_OWN_FULL = {"stale window", faults.SEAM}
# What changes the pass that fills the cache; all others leave it alone, and it is run once for them.
_OWN_PREFIX = _OWN_FULL | {"cache never returned"}


@dataclass(frozen=True)
class Pair:
    """Two computations of the same thing, for one text.

    Attributes
    ----------
    document, symptom : str
        What it is an example of.
    source : str
        Of the text: the unit of resampling.
    sample : int
        Number of the text.
    n_tokens : int
        Its length.
    drift : float
        As in `probe.Reading`.
    """

    document: str
    symptom: str
    source: str
    sample: int
    n_tokens: int
    drift: float

    def row(self, **more: Any) -> dict[str, Any]:
        """Give a row; what planted bugs have besides stays empty."""
        empty = {"held": None, "fed": None, "alone": None}
        # An empty field is read as NaN; the letters would not be.
        drift = None if np.isnan(self.drift) else self.drift
        return vars(self) | {"drift": drift} | empty | more


def _of_logits(reference: torch.Tensor, other: torch.Tensor) -> float:
    return probe.relative(reference, other, centred=True).item()


def planted(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[corpus.Sample]
) -> Iterator[tuple[Pair, dict[str, Any]]]:
    """Plant every bug that applies to a model, and none."""
    names = [CLEAN, *(name for name, fault in faults.FAULTS.items() if fault.applies(model.config)), faults.SEAM]
    for text in texts:
        ids = torch.tensor([text.ids], device=model.device)
        full = probe.full_pass(model, ids)
        if model.dtype is torch.float64:
            stock = model(ids, use_cache=False).logits[0, -1]
            found, held = probe.cached(model, ids, [ids.shape[1] - 1, 1], use_cache=True)
            pair = Pair(PLANTED, NARROW_INSIDE, text.source, text.index, ids.shape[1], _of_logits(stock, found.logits))
            yield pair, {"held": held, "fed": held, "alone": 0}
        prefix = every_dtype.written(model, ids)
        for name in names:
            if name not in _OWN_PREFIX:
                with faults.FAULTS[name].plant(model) if name in faults.FAULTS else nullcontext():
                    drift = _of_logits(full.logits, every_dtype.step(model, ids, prefix).logits)
                held = ids.shape[1] - 1
                pair = Pair(PLANTED, name, text.source, text.index, ids.shape[1], drift)
                yield pair, {"held": held, "fed": held, "alone": 0}
                continue
            whole, fed = (faults.seam(tokenizer, text.ids) if name == faults.SEAM else None) or (text.ids, text.ids)
            if name == faults.SEAM and whole == fed:
                continue
            with faults.FAULTS[name].plant(model) if name in faults.FAULTS else nullcontext():
                # A model is asked for its cache: what its configuration says is a matter of its own.
                options = {} if name == "cache never returned" else {"use_cache": True}
                (reading,) = probe.readings(
                    model, torch.tensor([whole], device=model.device), torch.tensor([fed], device=model.device),
                    np.random.default_rng(0), (probe.SPLIT,), None if name in _OWN_FULL else full, **options,
                )
            pair = Pair(PLANTED, name, text.source, text.index, len(fed), reading.drift)
            yield pair, {"held": reading.held, "fed": reading.fed, "alone": int(reading.alone)}


def of_any_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[corpus.Sample]
) -> Iterator[Pair]:
    """Repeat the symptoms that need no particular family: the issue's, the thread's on reuse, the notebook's."""
    for text in texts:
        ids = torch.tensor([text.ids], device=model.device)
        about = (text.source, text.index, ids.shape[1])
        full = model(ids, use_cache=False).logits[0, -1]
        prefix = model(ids[:, :-1], use_cache=True).past_key_values
        whole = model(ids, use_cache=True).past_key_values
        again = copy.deepcopy(prefix)
        dynamic = model(ids[:, -1:], past_key_values=prefix, use_cache=True).logits[0, -1]
        yield Pair(ISSUE, DRIFT, *about, _of_logits(full, dynamic))
        # The opening post's loop: on top of the cache comes everything once more.
        fed_again = model(ids, past_key_values=again, use_cache=True).logits[0, -1]
        yield Pair(ISSUE, FED_AGAIN, *about, _of_logits(full, fed_again))
        yield Pair(REUSE, KEYS, *about, _keys_drift(model, ids, whole))
        written = model.generate(
            ids, past_key_values=whole, attention_mask=torch.ones_like(ids),
            do_sample=False, max_new_tokens=1, return_dict_in_generate=True, output_logits=True,
        )
        yield Pair(REUSE, WHOLE, *about, _of_logits(full, written.logits[0][0]))
        static = caches.make("static", model.config, ids.shape[1] + 1)
        model(ids[:, :-1], past_key_values=static, use_cache=True)
        found = model(ids[:, -1:], past_key_values=static, use_cache=True).logits[0, -1]
        yield Pair(STATIC, STATIC_NONE, *about, _of_logits(full, found))
        yield Pair(STATIC, STATIC_DYNAMIC, *about, _of_logits(dynamic, found))
    for number, item in enumerate(broken_items(tokenizer)):
        ids = torch.tensor([item.ids], device=model.device)
        about = (item.name, number, ids.shape[1])
        full = model(ids, use_cache=False).logits[0, -1]
        filled = continuations.fill(model, item.prefix_ids, "dynamic", 0)
        cut = caches.reusable(filled, item.prefix_ids, item.ids)
        for symptom, cache in ((ANEW, filled), (CUT, cut)):
            rest = ids[:, caches.length(cache) :]
            found = model(rest, past_key_values=cache, use_cache=True).logits[0, -1]
            yield Pair(REUSE, symptom, *about, _of_logits(full, found))


def broken_items(tokenizer: PreTrainedTokenizerBase) -> list[continuations.Item]:
    """List the thread's texts whose ids do not go on from the prefix's: a joined word, or else the documentation's space."""
    items = list(continuations.posted_items(tokenizer))
    broken = [item for item in items if caches.shared_length(item.prefix_ids, item.ids) < len(item.prefix_ids)]
    joined = [item for item in broken if item.case == JOINED]
    return joined or [item for item in broken if item.case == DOCUMENTED]


def _keys_drift(model: PreTrainedModel, ids: torch.Tensor, whole: Cache) -> float:
    """Compare the first layer's keys of a text's last tokens, fed whole and on top of the tokens before them."""
    parts = model(ids[:, :-_ROWS], use_cache=True).past_key_values
    parts = model(ids[:, -_ROWS:], past_key_values=parts, use_cache=True).past_key_values
    first, second = (cache.layers[0].keys[:, :, -_ROWS:].flatten() for cache in (whole, parts))
    return probe.relative(first, second).item()


def of_the_post(model: PreTrainedModel, texts: list[corpus.Sample]) -> Iterator[Pair]:
    """Repeat the blog post's call on one of its families, as it was in mid-2023 and as it is."""
    for way in past_tables.variants(model, shallower=False):
        symptom = BLOG_NAMES.get((model.config.model_type, way.name))
        if symptom is None:
            continue
        for text in texts:
            ids = torch.tensor([text.ids], device=model.device)
            drift = _of_logits(way.full(ids), way.split(ids).logits)
            yield Pair(BLOG, symptom, text.source, text.index, ids.shape[1], drift)


def of_the_scratch_model(settings: ScratchSettings, dtype: str) -> Iterator[dict[str, Any]]:
    """Repeat the symptoms of the thread about a model from scratch, on that chapter's model."""
    loaded = scratch_subject.load(settings, dtype)
    model, block = loaded.model, loaded.model.shape.block
    device = model.characters.weight.device
    about = {"model": "scratch", "weights": settings.weights, "dtype": dtype}
    with widened(model.characters.weight.dtype):
        for text in scratch_subject.texts(settings, loaded.vocabulary, block):
            long = scratch_subject.ids_of([text], device)[:, : _BLOCKS * block]
            within, prompt = long[:, :block], long[:, : block // 2]
            positions = torch.arange(prompt.shape[1], device=device)
            window = WAYS[WINDOW](model)
            posted = scratch_logits.read_steps(WAYS[POSTED](model), long)
            pairs = (
                (WITHIN, within, window.read(within), posted[block - 1]),
                (PAST_BLOCK, long, window.read(long), posted[-1]),
                (REPLY, long, window.read(long), scratch_logits.read_steps(WAYS["reply's cache"](model), long)[-1]),
                (
                    LAST_ONLY, prompt, model(prompt, positions, last_only=True)[:, 0],
                    scratch_logits.read_prompt(model, prompt, scratch_logits.LAST_ONLY),
                ),
            )
            for symptom, ids, reference, other in pairs:
                drift = _of_logits(reference[0], other[0])
                yield about | Pair(SCRATCH, symptom, text.source, text.index, ids.shape[1], drift).row()


def _names(settings: BugOrRoundingSettings) -> tuple[str, ...]:
    return settings.model, *settings.families


def _of_scratch(settings: BugOrRoundingSettings) -> ScratchSettings:
    """Ask the chapter of the model from scratch for what these settings ask of the others."""
    return ScratchSettings.checked(
        weights="random" if settings.weights in ("random", "untrained") else "stand-in", corpus="stdlib",
        n_samples=max(2, settings.n_samples), n_blocks=_BLOCKS, dtypes=settings.dtypes, device=settings.device,
        seed=settings.seed,
    )


def inputs(settings: BugOrRoundingSettings) -> dict[str, Any]:
    """Name the models, the one from scratch last, and the corpus, and refuse what cannot be run."""
    models = every_dtype.identities(settings, _names(settings))
    scratch = scratch_subject.identity(_of_scratch(settings))
    return {"models": [*models, scratch], "corpus": corpus.describe(settings.corpus)}


def measure(settings: BugOrRoundingSettings, made_of: dict[str, Any], writer: records.Writer) -> None:
    """Plant bugs into every model, and repeat the symptoms on those that they need."""

    def rows_of(loaded: loading.Loaded, texts: list[corpus.Sample]) -> Iterator[dict[str, Any]]:
        model, kind = loaded.model, loaded.model.config.model_type
        if not loading.is_masked(model.config):
            for pair, more in planted(model, loaded.tokenizer, texts):
                yield pair.row(**more)
        with widened(model.dtype):
            if kind in AS_IN_2023:
                for pair in of_the_post(model, texts):
                    yield pair.row()
            if loaded.name == made_of["models"][0]["name"]:
                for pair in of_any_model(model, loaded.tokenizer, texts):
                    yield pair.row()

    every_dtype.measure(settings, _names(settings), rows_of, writer)
    for dtype in settings.dtypes:
        if (unit := f"extra|{dtype}") not in writer.done:
            with torch.inference_mode():
                writer.append(unit, list(of_the_scratch_model(_of_scratch(settings), dtype)))


def work(settings: BugOrRoundingSettings) -> Work:
    """Count the passes of each model in each dtype."""
    # The full pass, that which fills the cache, and the faults that change one; half are the documents' own symptoms.
    return Work(
        lengths.middle(settings.n_tokens),
        20 * settings.n_samples,
        dtypes=settings.dtypes,
    )


EXPERIMENT = Experiment("bug_or_rounding", BugOrRoundingSettings, inputs, measure, work=work)
