"""Injected bugs, clean families, and what the five documents ran, each at several unit roundoffs.

A second experiment follows the drift after every layer, of a clean model and of one with a bug in a single layer.

Rows, one a (model, dtype, document, symptom, text), and one a (dtype, bug, text, layer): see ``data/README.md``.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvbook import lengths
from kvbook.diagnosis import faults, probe
from kvbook.measuring import caches, full_and_split, in_fp64
from kvbook.models import corpus, kept, loading
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer, samples
from kvreport.chapters.blog_past import past_tables
from kvreport.chapters.bug_or_rounding import BugOrRoundingSettings, rows
from kvreport.chapters.from_scratch import ScratchSettings
from kvreport.chapters.from_scratch import logits as scratch_logits
from kvreport.chapters.from_scratch import subject as scratch_subject
from kvreport.chapters.from_scratch.gpt.paths import WAYS
from kvreport.chapters.from_scratch.rows import LAST_ONLY, POSTED, REPLY, WINDOW
from kvreport.chapters.prompt_reuse import continuations, split_keys
from kvreport.chapters.prompt_reuse.rows import DOCUMENTED, JOINED

# Makes the rows of one model in one dtype; the texts are the same in all dtypes.
RowsOf = Callable[[loading.Loaded, list[corpus.Sample]], Rows]
# Blocks of characters after which the thread's caches are compared.
_BLOCKS = 2
# Tokens of the second part in which the first layer's keys are compared; few, since on CPUs few rows are what differs.
_ROWS = 3
# What changes the pass without a cache too.
_OWN_FULL = {"stale window", faults.SEAM}
# What changes the pass that fills the cache; all others leave it alone, and it is run once for them.
_OWN_PREFIX = _OWN_FULL | {"cache never returned"}
# The two that are injected into a single layer too.
_INJECT = {rows.LATE: faults.one_step_late, rows.NARROW: faults.kept_in_16_bits}


def identities(settings: BugOrRoundingSettings, names: Iterable[str]) -> list[dict[str, Any]]:
    """Name the models of a run and refuse what cannot be run; where no stand-in ships, weights are random."""
    # One symptom feeds the text a second time.
    models = samples.identities(settings, names, 2 * lengths.longest(settings.n_tokens), past_tables.weights_for)
    for model in models:
        _texts(settings, model["asked_for"])
    return models


def _texts(settings: BugOrRoundingSettings, name: str) -> list[corpus.Sample]:
    tokenizer = kept.tokenizer(name, past_tables.weights_for(settings, name))
    return list(corpus.samples(settings.corpus, tokenizer, settings.n_samples, settings.n_tokens, settings.seed))


def step(model: PreTrainedModel, ids: torch.Tensor, prefix: Cache) -> full_and_split.LastToken:
    """Feed a text's last token on top of a copy of what all tokens before it have written."""
    past = copy.deepcopy(prefix)
    with in_fp64.widened(model.dtype):
        return probe.last_tokens(model(ids[:, -1:], past_key_values=past, use_cache=True, output_hidden_states=True))[0]


def written(model: PreTrainedModel, ids: torch.Tensor) -> Cache:
    """Write keys and values of all tokens but the last."""
    with in_fp64.widened(model.dtype):
        return model(ids[:, :-1], use_cache=True).past_key_values


def in_every_dtype(settings: BugOrRoundingSettings, names: Iterable[str], rows_of: RowsOf, writer: Writer) -> None:
    """Measure every model in every dtype."""
    texts = {name: _texts(settings, name) for name in names}
    units = {f"{name}|{dtype}": (name, dtype) for name in texts for dtype in settings.dtypes}
    for unit, (name, dtype) in writer.pending(units, "full pass against cache: model and dtype"):
        loaded = samples.load(settings, name, dtype, choose=past_tables.weights_for)
        writer.keep(unit, loaded.about, rows_of(loaded, texts[name]))


def _row(
    document: str, symptom: str, source: str, sample: int, n_tokens: int, drift: float,
    held: int | None = None, fed: int | None = None,
) -> Row:
    # An empty field is read as NaN; the letters would not be.
    return locals() | {"drift": None if np.isnan(drift) else drift}


def _drift(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Measure the difference of two rows of logits."""
    return probe.relative(reference, other, centred=True).item()


def injected(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[corpus.Sample]) -> Rows:
    """Inject every bug that applies to a model, and none."""
    names = [rows.CLEAN, *(name for name, fault in faults.FAULTS.items() if fault.applies(model.config)), faults.SEAM]
    for text in texts:
        ids = torch.tensor([text.ids], device=model.device)
        about, held = (text.source, text.index, ids.shape[1]), ids.shape[1] - 1
        full, prefix = probe.full_rows(model, ids)[0], written(model, ids)
        if model.dtype is torch.float64:
            stock = model(ids, use_cache=False).logits[0, -1]
            (found,), _ = probe.cached_rows(model, ids, [held, 1], use_cache=True)
            yield _row(rows.INJECTED, rows.NARROW_INSIDE, *about, _drift(stock, found.logits), held, held)
        for name in names:
            pair = faults.seam(tokenizer, text.ids) if name == faults.SEAM else (text.ids, text.ids)
            if pair is None:
                continue
            with faults.FAULTS[name].inject(model) if name in faults.FAULTS else nullcontext():
                if name in _OWN_PREFIX:
                    whole, fed = (torch.tensor([of], device=model.device) for of in pair)
                    # A model is asked for its cache: what its configuration says is a matter of its own.
                    options = {} if name == "cache never returned" else {"use_cache": True}
                    [[reading]] = probe.readings(
                        model, whole, fed, np.random.default_rng(0), (probe.SPLIT,),
                        None if name in _OWN_FULL else [full], **options,
                    )
                    measured = (reading.drift, reading.held, reading.fed)
                else:
                    measured = (_drift(full.logits, step(model, ids, prefix).logits), held, held)
            yield _row(rows.INJECTED, name, *about[:2], len(pair[1]), *measured)


def _on_top(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Feed tokens on top of a cache, and take the last one's logits."""
    return model(ids, past_key_values=cache, use_cache=True).logits[0, -1]


def of_any_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[corpus.Sample]) -> Rows:
    """Repeat the symptoms that need no particular family: the issue's, the thread's on reuse, the notebook's."""
    for text in texts:
        ids = torch.tensor([text.ids], device=model.device)
        about = (text.source, text.index, ids.shape[1])
        full = model(ids, use_cache=False).logits[0, -1]
        prefix, whole = (model(part, use_cache=True).past_key_values for part in (ids[:, :-1], ids))
        again, static = copy.deepcopy(prefix), caches.make("static", model.config, ids.shape[1] + 1)
        dynamic = _on_top(model, ids[:, -1:], prefix)
        yield _row(rows.ISSUE, rows.DRIFT, *about, _drift(full, dynamic))
        # The opening post's loop: on top of the cache comes everything once more.
        yield _row(rows.ISSUE, rows.FED_AGAIN, *about, _drift(full, _on_top(model, ids, again)))
        yield _row(rows.REUSE, rows.KEYS, *about, _keys_drift(model, ids, whole))
        written = continuations.generate(model, text.ids, 1, whole)
        yield _row(rows.REUSE, rows.WHOLE, *about, _drift(full, written.logits[0][0]))
        _, found = (_on_top(model, part, static) for part in (ids[:, :-1], ids[:, -1:]))
        yield _row(rows.STATIC, rows.STATIC_NONE, *about, _drift(full, found))
        yield _row(rows.STATIC, rows.STATIC_DYNAMIC, *about, _drift(dynamic, found))
    for number, item in enumerate(broken_items(tokenizer)):
        ids = torch.tensor([item.ids], device=model.device)
        full = model(ids, use_cache=False).logits[0, -1]
        filled = continuations.fill(model, item.prefix_ids, "dynamic", 0)
        cut = caches.reusable(filled, item.prefix_ids, item.ids)
        for symptom, cache in ((rows.ANEW, filled), (rows.CUT, cut)):
            found = _on_top(model, ids[:, caches.length(cache) :], cache)
            yield _row(rows.REUSE, symptom, item.name, number, ids.shape[1], _drift(full, found))


def broken_items(tokenizer: PreTrainedTokenizerBase) -> list[continuations.Item]:
    """List the thread's texts whose ids do not continue the prefix's: a joined word, or the documentation's space."""
    items = list(continuations.posted_items(tokenizer))
    broken = [item for item in items if caches.shared_length(item.prefix_ids, item.ids) < len(item.prefix_ids)]
    joined = [item for item in broken if item.case == JOINED]
    return joined or [item for item in broken if item.case == DOCUMENTED]


def _keys_drift(model: PreTrainedModel, ids: torch.Tensor, whole: Cache) -> float:
    """Compare the first layer's keys of a text's last tokens, fed whole and on top of the tokens before them."""
    parts = split_keys.in_two_parts(model, ids, ids.shape[1] - _ROWS)
    first, second = (cache.layers[0].keys[:, :, -_ROWS:].flatten() for cache in (whole, parts))
    return probe.relative(first, second).item()


def of_the_post(model: PreTrainedModel, texts: list[corpus.Sample]) -> Rows:
    """Repeat the blog post's call on one of its families, as it was in mid-2023 and as it is."""
    for way in past_tables.variants(model, shallower=False):
        if symptom := rows.BLOG_NAMES.get((model.config.model_type, way.name)):
            for text in texts:
                ids = torch.tensor([text.ids], device=model.device)
                drift = _drift(way.model(ids).logits[0, -1], way.split(ids)[0])
                yield _row(rows.BLOG, symptom, text.source, text.index, ids.shape[1], drift)


def of_the_scratch_model(settings: ScratchSettings, dtype: str) -> Rows:
    """Repeat the symptoms of the thread about a model from scratch, on that chapter's model."""
    loaded = scratch_subject.load(settings, dtype)
    model, block = loaded.model, loaded.model.shape.block
    about = {"model": "scratch", "weights": settings.weights, "dtype": dtype}
    with in_fp64.widened(model.characters.weight.dtype):
        for text in scratch_subject.texts(settings, loaded.vocabulary, block):
            long = scratch_subject.ids_of([text], model.device)[:, : _BLOCKS * block]
            within, prompt = long[:, :block], long[:, : block // 2]
            window = WAYS[WINDOW](model)
            posted, reply = (scratch_logits.read_steps(WAYS[way](model), long) for way in (POSTED, REPLY))
            whole = model(prompt, torch.arange(prompt.shape[1], device=model.device), last_only=True)[:, 0]
            last_only = scratch_logits.read_prompt(model, prompt, LAST_ONLY)
            for symptom, ids, reference, other in (
                (rows.WITHIN, within, window.read(within), posted[block - 1]),
                (rows.PAST_BLOCK, long, window.read(long), posted[-1]),
                (rows.REPLY, long, window.read(long), reply[-1]), (rows.LAST_ONLY, prompt, whole, last_only),
            ):
                drift = _drift(reference[0], other[0])
                yield about | _row(rows.SCRATCH, symptom, text.source, text.index, ids.shape[1], drift)


def _of_scratch(settings: BugOrRoundingSettings) -> ScratchSettings:
    """Ask the chapter of the model from scratch for what these settings ask of the others."""
    # It was trained on Python source, and a small folder has no held-out part.
    return ScratchSettings.checked(
        weights="random" if settings.weights in ("random", "untrained") else "stand-in", corpus="stdlib",
        n_samples=max(2, settings.n_samples), n_blocks=_BLOCKS, dtypes=settings.dtypes, device=settings.device,
        seed=settings.seed,
    )


def inputs(settings: BugOrRoundingSettings) -> Inputs:
    """Name the models, the one from scratch last, and the corpus, and refuse what cannot be run."""
    models = identities(settings, (settings.model, *settings.families))
    scratch = scratch_subject.identity(_of_scratch(settings))
    return {"models": [*models, scratch], "corpus": corpus.describe(settings.corpus)}


def measure(settings: BugOrRoundingSettings, made_of: Inputs, writer: Writer) -> None:
    """Inject bugs into every model, and repeat the symptoms on those that they need."""

    def rows_of(loaded: loading.Loaded, texts: list[corpus.Sample]) -> Rows:
        model = loaded.model
        if not loading.is_masked(model.config):
            yield from injected(model, loaded.tokenizer, texts)
        with in_fp64.widened(model.dtype):
            yield from of_the_post(model, texts)
            if loaded.name == made_of["models"][0]["name"]:
                yield from of_any_model(model, loaded.tokenizer, texts)

    in_every_dtype(settings, (settings.model, *settings.families), rows_of, writer)
    for dtype in settings.dtypes:
        if (unit := f"extra|{dtype}") not in writer.done:
            writer.keep(unit, {}, of_the_scratch_model(_of_scratch(settings), dtype))


def inputs_of_layers(settings: BugOrRoundingSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    return {"models": identities(settings, [settings.model]), "corpus": corpus.describe(settings.corpus)}


def _layers_of(loaded: loading.Loaded, texts: list[corpus.Sample]) -> Rows:
    # The middle layer gets the bug; rows count from 1, for 0 is the embedding.
    model, index = loaded.model, loaded.model.config.num_hidden_layers // 2
    for text in texts:
        ids = torch.tensor([text.ids], device=model.device)
        # No bug changes the pass that fills the cache.
        full, prefix = probe.full_rows(model, ids)[0], written(model, ids)
        for bug in (rows.CLEAN, *_INJECT):
            with _INJECT[bug](model, layers={index}) if bug in _INJECT else nullcontext():
                found = step(model, ids, prefix)
            about = {"bug": bug, "planted_in": index + 1 if bug in _INJECT else None}
            about |= {"sample": text.index, "source": text.source}
            for layer, drift in enumerate(probe.relative(full.hidden, found.hidden).tolist()):
                yield about | {"layer": layer, "drift": drift}


def measure_layers(settings: BugOrRoundingSettings, _made_of: Inputs, writer: Writer) -> None:
    """Measure the first model, clean and with each bug."""
    in_every_dtype(settings, [settings.model], _layers_of, writer)


# The full pass, that which fills the cache, and the faults that change one; half are the documents' own symptoms.
EXPERIMENT = Experiment("bug_or_rounding", BugOrRoundingSettings, inputs, measure, work=Work.per_text(passes=20))
FIRST_BAD_LAYER = Experiment(
    "first_bad_layer", BugOrRoundingSettings, inputs_of_layers, measure_layers,
    work=Work.per_text(passes=2, steps=1 + len(_INJECT)),
)
