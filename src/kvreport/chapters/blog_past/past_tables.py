"""The blog post's comparison of last-token logits with and without past, and the switches behind it.

Each family is run as it was in mid-2023 and as it is now:

GPT-2
    ``native``: nothing is changed.
MPT
    ``use_cache off``: its configuration's default, under which the posted call gets no past; ``native``: on.
RoBERTa
    ``no past returned``: a bidirectional model returns none; ``decoder``: with ``is_decoder`` it is causal and returns
    one; ``past handed over``: a bidirectional model fills a cache that is passed by hand, here in its first layers
    alone, which shows what depth makes of it.
Falcon
    ``native``; ``mask upper left``: the single query of a cached step is given the causal mask of a first token, so
    that it sees the first key alone; ``rotary without offset``: it is rotated as if it stood at place 0; and both.

Rows, one a (model, quantization, variant, layers, sample): see ``data/README.md``.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, RobertaForCausalLM
from transformers.utils import logging

from kvbook import UserError, paths
from kvbook.diagnosis.faults import upper_left_mask
from kvbook.measuring import agreement
from kvbook.models import corpus, loading, lowbit, registry
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer, samples
from kvbook.settings import Settings
from kvreport.chapters.blog_past import PastTablesSettings
from kvreport.chapters.blog_past import rows as named
from kvreport.publishing import documents

# The last token's logits from a past, and how many tokens it held when that token was fed; 0 when there was none.
Split = tuple[torch.Tensor, int]


def split_call(
    model: PreTrainedModel, ids: torch.Tensor, last_step=nullcontext, cache: DynamicCache | None = None, **last
) -> Split:
    """Make the posted call: all tokens but the last, then the last with whatever past was returned."""
    returned = model(ids[:, :-1], past_key_values=cache).past_key_values
    past = returned if cache is None else cache
    held = 0 if past is None else int(past.get_seq_length())
    with last_step():
        return model(ids[:, -1:], past_key_values=past, **last).logits[0, -1], held


class Variant(NamedTuple):
    """A way to run the posted call.

    Attributes
    ----------
    name : str
        What is switched.
    model : PreTrainedModel
        What is run; of a shallower one, the first layers.
    split : callable
        The split call, of ids of shape (1, seq_len).
    """

    name: str
    model: PreTrainedModel
    split: Callable[[torch.Tensor], Split]


def variants(model: PreTrainedModel, shallower: bool = True) -> list[Variant]:
    """List the variants of a causal model, or of a masked one of RoBERTa's classes, cut to its first layers too."""
    kind = model.config.model_type
    if kind == "roberta":
        return list(_of_roberta(model, shallower))

    def call(ids: torch.Tensor, use_cache: bool = True, **switches) -> Split:
        with patch.object(model.config, "use_cache", use_cache):
            return split_call(model, ids, **switches)

    calls = {named.NATIVE: {}}
    if kind == "mpt":
        calls = {named.CACHE_OFF: {"use_cache": False}} | calls
    elif kind == "falcon":
        mask = {"last_step": upper_left_mask}
        rotary = {"position_ids": torch.zeros((1, 1), dtype=torch.long, device=model.device)}
        calls |= {named.UPPER_LEFT: mask, named.NO_OFFSET: rotary, named.BOTH: mask | rotary}
    return [Variant(name, model, functools.partial(call, **switches)) for name, switches in calls.items()]


def _of_roberta(masked: PreTrainedModel, shallower: bool) -> Iterator[Variant]:
    everything = masked.config.num_hidden_layers

    def as_causal(decoder: bool, layers: int = everything) -> PreTrainedModel:
        changes = {"is_decoder": decoder, "num_hidden_layers": layers}
        config = type(masked.config).from_dict(masked.config.to_dict() | changes)
        with ExitStack() as stack, masked.device:
            stack.callback(logging.set_verbosity, logging.get_verbosity())
            # To be no decoder is what the post did, and what the class warns about.
            logging.set_verbosity_error()
            built = RobertaForCausalLM(config)
        # A shallower model takes the first layers' weights and leaves the others.
        built.load_state_dict(masked.state_dict(), strict=layers == everything)
        return built.to(masked.dtype).eval().requires_grad_(False)

    for name, decoder in ((named.NO_PAST, False), (named.DECODER, True)):
        built = as_causal(decoder)
        yield Variant(name, built, functools.partial(split_call, built))
    depths = {1, 2, 3, everything // 2, everything} if shallower else {everything}
    for layers in sorted(depths & set(range(1, everything + 1))):
        shallow = as_causal(False, layers)
        yield Variant(named.HANDED, shallow, lambda ids, of=shallow: split_call(of, ids, cache=DynamicCache()))


def described(values: torch.Tensor) -> list[float]:
    """Return the post's statistics of a vector, shape (n,): mean, standard deviation (n - 1), and five quantiles."""
    # torch.quantile refuses vectors as long as a large vocabulary in some versions.
    wide = values.double().numpy()
    return [float(wide.mean()), float(wide.std(ddof=1)), *np.quantile(wide, (0, 0.25, 0.5, 0.75, 1)).tolist()]


def compare(full: torch.Tensor, split: torch.Tensor, alone: torch.Tensor) -> Row:
    """Measure a split call's logits against the full pass and against the last token alone."""
    drift, decision = agreement.drift(full, split), agreement.decision(full, split)
    difference = (full.double() - split.double()).abs()
    row = {
        "max_abs": drift.max_abs.item(), "relative_rms": drift.relative_rms.item(),
        # Logits may be shifted by any constant: their spread is the scale that a softmax sees.
        "relative_spread": (drift.rms / full.double().std()).item(),
        "alone_max_abs": agreement.drift(alone, split).max_abs.item(), "top1_flip": int(decision.top1_flip),
        "kl_nats": decision.kl_nats,
    }
    # A logit of exactly zero has no relative difference.
    there = full != 0
    element = difference[there] / full[there].double().abs()
    for label, values in (("without", full), ("with", split), ("absolute", difference), ("element", element)):
        row |= {f"{label} {name}": value for name, value in zip(named.statistics(), described(values), strict=True)}
    return row


def weights_for(settings: Settings, name: str) -> str:
    """Choose the weights of one model: `samples.weights_of`, or random ones where a family's stand-in does not ship.

    What this experiment asks, whether a context is there, does not need training; the rows say which it was.
    """
    ships = name not in registry.families() or (paths.STANDINS / name).is_dir()
    wanted = samples.weights_of(settings, name)
    return wanted if ships or wanted != "stand-in" else "untrained"


def inputs(settings: PastTablesSettings) -> Inputs:
    """Name models, quantizations and texts, and refuse what cannot be run."""
    for quantization in settings.quantizations:
        lowbit.check(quantization, settings.dtype)
        if quantization != "none" and settings.memory is not None:
            raise UserError("weights that are read a layer at a time are not quantized: quantizations=none")
    names = (settings.model, *settings.families)
    return {
        "text": documents.published("blog-past")["text"],
        "models": samples.identities(settings, names, settings.n_tokens, weights_for),
        "quantizations": [lowbit.identity(quantization) for quantization in settings.quantizations],
        "corpus": corpus.describe(settings.corpus),
    }


def _texts(settings: PastTablesSettings, tokenizer) -> Iterator[tuple[str, str, list[int]]]:
    yield named.POSTED, named.POSTED, tokenizer(documents.published("blog-past")["text"])["input_ids"]
    for sample in corpus.samples(settings.corpus, tokenizer, settings.n_samples, settings.n_tokens, settings.seed):
        # Encoded anew, so that every text has the special tokens that a call by hand would give it.
        text = tokenizer.decode(sample.ids, skip_special_tokens=True)
        ids = tokenizer(text, truncation=True, max_length=settings.n_tokens)["input_ids"]
        yield str(sample.index), sample.source, ids


def _without_past(tokens: torch.Tensor, model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the last token's logits behind all others, and alone."""
    return [model(part).logits[0, -1].cpu() for part in (tokens, tokens[:, -1:])]


def _rows(settings: PastTablesSettings, loaded: loading.Loaded) -> Rows:
    of_model = variants(loaded.model)
    for sample, source, ids in _texts(settings, loaded.tokenizer):
        tokens = torch.tensor([ids], device=loaded.model.device)
        without_past = functools.cache(functools.partial(_without_past, tokens))
        for variant in of_model:
            full, alone = without_past(variant.model)
            split, held = variant.split(tokens)
            yield {
                "variant": variant.name, "layers": variant.model.config.num_hidden_layers, "sample": sample,
                "source": source, "n_tokens": len(ids), "held": held, **compare(full, split.cpu(), alone),
            }


def measure(settings: PastTablesSettings, made_of: Inputs, writer: Writer) -> None:
    """Compare every model, quantization and variant on the posted text and on samples of the corpus."""
    units = {
        f"{model['asked_for']}|{quantization}": (model, quantization)
        for model in made_of["models"] for quantization in settings.quantizations
        # The bidirectional model is rebuilt from its weights, and the document did not quantize it.
        if quantization == "none" or model["architecture"] != "roberta"
    }
    for unit, (model, quantization) in writer.pending(units, "with and without past: model and quantization"):
        loaded = samples.load(
            settings, model["asked_for"], settings.dtype, quantization=quantization, choose=weights_for
        )
        about = {
            "model": loaded.name, "family": model["architecture"], "weights": loaded.weights, "dtype": settings.dtype,
            "quantization": quantization,
        }
        writer.keep(unit, about, _rows(settings, loaded))


def work(settings: PastTablesSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts = len(settings.quantizations) * (settings.n_samples + 1)
    return Work(settings.n_tokens, 2 * n_texts, 2 * n_texts, (settings.dtype,))


EXPERIMENT = Experiment("past_tables", PastTablesSettings, inputs, measure, work=work)
