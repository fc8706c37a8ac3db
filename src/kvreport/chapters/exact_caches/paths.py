"""Every way to feed the same tokens against the full pass, with stock arithmetic and under `row_invariant`.

Rows, one a (model, dtype, sample, arithmetic, way): see ``data/README.md``.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from kvbook import UserError, exact
from kvbook.exact.verification import fed
from kvbook.models import corpus, registry, sources
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer, samples
from kvreport.chapters.exact_caches.rows import ARITHMETICS, EXACT, SINGLE
from kvreport.chapters.exact_caches.settings import ExactCachesSettings

# Tokens that a padded text is moved by.
_PAD = 7


def subjects(settings: ExactCachesSettings) -> list[str]:
    """Name the models of a run; ``all`` stands for the causal families that have weights of the kind asked for."""
    if settings.families != ("all",):
        return list(settings.families)
    families = registry.families()
    return [name for name in sources.families_with(settings.weights) if families[name].objective == "next token"]


def chunks(length: int) -> list[int]:
    """Cut a text into uneven chunks, single tokens among them."""
    first = length // 2 - 3
    return [first, 1, 1, length - first - 5, 3]


def ways(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Score a text in every way but at once."""
    length, config = ids.shape[1], model.config
    yield "prefix + last token", fed(model, ids, [length - 1, 1], DynamicCache(config=config))
    yield "chunks", fed(model, ids, chunks(length), DynamicCache(config=config))
    static = StaticCache(config=config, max_cache_len=length + _PAD)
    yield "chunks, static cache", fed(model, ids, chunks(length), static)
    yield SINGLE, fed(model, ids, [1] * length, DynamicCache(config=config))
    yield "in a batch of three", model(torch.cat([ids.flip(1), ids, ids.roll(5, 1)])).logits[1]
    padded = torch.cat([ids[:, :_PAD], ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :_PAD] = 0
    # MPT counts from the query and takes no positions; the others need those that the text has without padding.
    place = {} if config.model_type == "mpt" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    yield "left-padded", model(padded, attention_mask=mask, **place).logits[0, _PAD:]
    yield "generate", _generated(model, ids)


def _generated(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Let the library write half the text, by allowing nothing else; of the rows before, it gives none."""
    half = ids.shape[1] // 2
    output = model.generate(
        ids[:, :half], attention_mask=torch.ones_like(ids[:, :half]), do_sample=False, max_length=ids.shape[1],
        prefix_allowed_tokens_fn=lambda _, held: [int(ids[0, min(len(held), ids.shape[1] - 1)])],
        return_dict_in_generate=True, output_logits=True,
    )
    return torch.cat(output.logits)


def switched(arithmetic: str) -> AbstractContextManager[Any]:
    """Switch one of `ARITHMETICS` on."""
    return exact.row_invariant() if arithmetic == EXACT else nullcontext()


def compare(model: PreTrainedModel, ids: torch.Tensor) -> Rows:
    """Hold every way against the full pass, under both arithmetics."""
    for arithmetic in ARITHMETICS:
        with torch.inference_mode(), switched(arithmetic):
            full = model(ids, use_cache=False).logits[0]
            for way, logits in ways(model, ids):
                # `generate` gives the last rows only, each as float32.
                reference = full[: -1 if way == "generate" else None][-len(logits) :].to(logits.dtype)
                yield {"arithmetic": arithmetic, "way": way, **against(reference, logits)}


def against(reference: torch.Tensor, logits: torch.Tensor) -> Row:
    """Compare rows of logits bit for bit."""
    equal = (reference == logits).all(-1)
    return {
        "rows": len(equal), "equal_rows": int(equal.sum()),
        "max_abs": (reference.double() - logits.double()).abs().max().item(),
        "flips": int((reference.argmax(-1) != logits.argmax(-1)).sum()),
    }


def inputs(settings: ExactCachesSettings) -> Inputs:
    """Name the models and the corpus, and refuse what cannot be run before anything is."""
    if not (names := subjects(settings)):
        raise UserError("no family has its weights here: name models in `families`, or choose weights='random'")
    models = samples.identities(settings, names, settings.n_tokens + _PAD)
    samples.check_corpus(settings, names, settings.n_samples, settings.n_tokens)
    return {"models": models, "corpus": corpus.describe(settings.corpus)}


def measure(settings: ExactCachesSettings, made_of: Inputs, writer: Writer) -> None:
    """Feed every text to every model in every way."""
    names = [model["asked_for"] for model in made_of["models"]]
    for loaded, text in samples.each(settings, writer, names, "ways to feed the same tokens"):
        text.keep(compare(loaded.model, text.ids), n_tokens=text.ids.shape[1])


def work(settings: ExactCachesSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts = len(ARITHMETICS) * settings.n_samples
    # All tokens one by one, half of them through generate, and a few of the chunks.
    return Work(settings.n_tokens, 9 * n_texts, 2 * settings.n_tokens * n_texts, settings.dtypes)


# The settings on which the rows depend; models are among the inputs.
FIELDS = frozenset({"weights", "device", "seed", "corpus", "n_samples", "n_tokens", "dtypes"})
EXPERIMENT = Experiment("exact_ways", ExactCachesSettings, inputs, measure, FIELDS, work=work)
