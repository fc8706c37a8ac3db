"""Every way to feed the same tokens against the full pass, with stock arithmetic and under `row_invariant`.

A second experiment asks which part of the arithmetic has to be invariant: rungs from stock to all of it, with drift and
error of each.

Rows, one a (model, dtype, sample, arithmetic, way), and one a (dtype, sample, rung): see ``data/README.md``.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from kvbook import UserError, exact
from kvbook.exact.verification import fed
from kvbook.measuring import fp64_reference, in_fp64
from kvbook.models import corpus, registry, sources
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer, samples
from kvreport.chapters.exact_caches import ExactCachesSettings
from kvreport.chapters.exact_caches import rows as named

# Tokens that a padded text is moved by.
_PAD = 7
# Attention implementation and invariant parts of every rung; None is torch's own arithmetic.
RUNGS: dict[str, tuple[str | None, tuple[str, ...] | None]] = {
    named.STOCK: (None, None), named.EAGER: ("eager", None), named.ATTENTION: (None, ("attention",)),
    named.PRODUCTS: (None, ("products",)), named.BOTH: (None, ("products", "attention")),
    named.ALL: (None, exact.PARTS),
}


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
    yield named.SINGLE, fed(model, ids, [1] * length, DynamicCache(config=config))
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
    return exact.row_invariant() if arithmetic == named.EXACT else nullcontext()


def compare(model: PreTrainedModel, ids: torch.Tensor) -> Rows:
    """Hold every way against the full pass, under both arithmetics."""
    for arithmetic in named.ARITHMETICS:
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
    n_texts = len(named.ARITHMETICS) * settings.n_samples
    # All tokens one by one, half of them through generate, and a few of the chunks.
    return Work(settings.n_tokens, 9 * n_texts, 2 * settings.n_tokens * n_texts, settings.dtypes)


# The settings on which the rows depend; models are among the inputs.
FIELDS = frozenset({"weights", "device", "seed", "corpus", "n_samples", "n_tokens", "dtypes"})
EXPERIMENT = Experiment("exact_ways", ExactCachesSettings, inputs, measure, FIELDS, work=work)


def inputs_of_ladder(settings: ExactCachesSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    return samples.inputs(settings, [settings.model], settings.n_samples, settings.n_tokens)


def measure_ladder(settings: ExactCachesSettings, _made_of: Inputs, writer: Writer) -> None:
    """Take every text through all rungs, in every dtype."""
    truth = fp64_reference.Reference(settings.dtypes)
    for dtype in settings.dtypes:
        loaded = {kind: samples.load(settings, settings.model, dtype, kind) for kind in (None, "eager")}
        truth.take(loaded["eager"].model)
        for text in samples.pending(settings, writer, loaded[None], dtype, f"ladder of the arithmetic, {dtype}"):
            ids, index = text.ids, text.sample.index
            with torch.inference_mode(), in_fp64.widened(torch.float64):
                (reference,) = truth.of(index, lambda model, ids=ids: (model(ids, use_cache=False).logits[0],))
            rows = (
                {"rung": name} | _score(loaded[attention].model, parts, ids, reference)
                for name, (attention, parts) in RUNGS.items()
            )
            text.keep(rows, n_tokens=ids.shape[1])


def _score(model: PreTrainedModel, parts: tuple[str, ...] | None, ids: torch.Tensor, reference: torch.Tensor) -> Row:
    with torch.inference_mode(), nullcontext() if parts is None else exact.row_invariant(parts):
        full = model(ids, use_cache=False).logits[0]
        single = fed(model, ids, [1] * ids.shape[1], DynamicCache(config=model.config))
    errors = [(logits.double() - reference).square().mean().sqrt().item() for logits in (full, single)]
    return against(full, single) | {
        "error_rms": errors[0], "step_error_rms": errors[1], "reference_rms": reference.square().mean().sqrt().item(),
    }


def work_of_ladder(settings: ExactCachesSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts, n_tokens = len(RUNGS) * settings.n_samples, settings.n_tokens
    return Work(n_tokens, n_texts, n_tokens * n_texts, settings.dtypes, in_fp64=settings.n_samples, copies=2)


LADDER = Experiment("exact_ladder", ExactCachesSettings, inputs_of_ladder, measure_ladder, FIELDS, work=work_of_ladder)
