"""Texts as long as a model's context, in one pass and in pieces on caches, all held against fp64 by position.

Every piece has 256 tokens; what is read first is not scored.  Positions fall into half octaves, so that texts of all
lengths meet in the first ones.  Of each at most 64 positions are scored, evenly spread: the output head reads those
alone, and the logits of a whole text are never there.  The reference has the weights of the dtype under test.

Rows, one a (model, dtype, sample, way, bin of positions): see ``data/README.md``.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from kvbook import UserError
from kvbook.measuring import caches, fp64_reference, predictions
from kvbook.measuring.in_fp64 import widened
from kvbook.models import corpus, loading, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter import variants
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings

# Positions of a bin that are scored.
SCORED = 64


def texts(settings: DoesItMatterSettings) -> list[corpus.Sample]:
    """Cut a text of each length, within the model's context, and each from a file of its own: the longest first."""
    limit = loading.identify(settings.model, settings.weights, settings.seed)["context_length"] or math.inf
    found: dict[str, corpus.Sample] = {}
    for n_tokens, n in sorted(Counter(min(length, limit) for length in settings.text_lengths).items(), reverse=True):
        samples = variants.texts(settings, len(found) + n, n_tokens)
        others = {sample.source: sample for sample in samples if sample.source not in found}
        if len(others) < n:
            raise UserError(f"corpus {settings.corpus!r} has too few files of {n_tokens} tokens: shorten text_lengths")
        found |= dict(itertools.islice(others.items(), n))
    return [dataclasses.replace(sample, index=index) for index, sample in enumerate(found.values())]


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    placement.dtype_on("float64", placement.device_of(settings.device))
    cut = texts(settings)
    return variants.inputs(settings, len(cut[0].ids), 1, len(cut[0].ids))


def measure(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Read every text without a cache, on caches and in fp64."""
    # A dtype's copy goes with the next one's.
    copy = functools.lru_cache(1)(fp64_reference.in_double_precision)

    def rows_of(subject: variants.Subject, sample: corpus.Sample) -> Rows:
        model = subject.baseline.model
        return follow(model, copy(model), subject.tensor([sample.ids]))

    variants.follow_all(settings, writer, texts(settings), "long contexts", rows_of)


def follow(model: PreTrainedModel, reference: PreTrainedModel, text: torch.Tensor) -> Rows:
    """Hold each cached pass along one text against the one without a cache and the reference, bin by bin."""
    ids, targets = text[:, :-1], text[0, 1:]
    piece = min(named.PIECE, text.shape[1] // 4)
    with widened(torch.float64):
        true = states(reference, ids)
    full = states(model, ids)
    for way, kind in named.LONG_WAYS.items():
        cache = caches.make(kind, model.config, ids.shape[1])
        cached = torch.cat([states(model, part, past_key_values=cache) for part in ids.split(piece, 1)])
        for place, (begin, end, at) in enumerate(bins(piece, ids.shape[1])):
            whole, pieces = (model.get_output_embeddings()(read[at]) for read in (full, cached))
            exact = reference.get_output_embeddings()(true[at])
            pairs = ((whole, pieces), (exact, whole), (exact, pieces))
            drift, of_full, of_cached = (predictions.compare(*pair, targets[at]) for pair in pairs)
            errors = fp64_reference.errors(exact, whole, pieces, pooled=True)
            yield {
                "length": text.shape[1], "way": way, "bin": place, "read_from": begin, "read_to": end,
                "n_tokens": len(at), "kl": drift.kl.mean().item(), "kl_full": of_full.kl.mean().item(),
                "kl_cached": of_cached.kl.mean().item(), "flips": int(drift.flip.sum()),
                "error_full": errors.first.item(), "error": errors.second.item(), "drift": errors.apart.item(),
            }


def bins(first: int, n_tokens: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut the positions behind the first ones into half octaves: where each begins and ends, and what is scored."""
    n_bins = round(2 * math.log2(n_tokens / first))
    edges = [round(first * 2 ** (place / 2)) for place in range(n_bins)] + [n_tokens]
    for begin, end in itertools.pairwise(edges):
        yield begin, end, torch.linspace(begin, end - 1, min(SCORED, end - begin), dtype=torch.float64).long()


def states(model: PreTrainedModel, ids: torch.Tensor, **options) -> torch.Tensor:
    """Return what the output head reads, one row a token fed."""
    options.setdefault("use_cache", "past_key_values" in options)
    return model.base_model(ids, **options).last_hidden_state[0]


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype, as passes over the longest text."""
    passes = sum(settings.text_lengths) / max(settings.text_lengths)
    return Work(max(settings.text_lengths), (1 + len(named.LONG_WAYS)) * passes, dtypes=settings.dtypes, in_fp64=passes)


EXPERIMENT = Experiment(
    "long_contexts", DoesItMatterSettings, inputs, measure, fields=variants.FIELDS | {"text_lengths"}, work=work
)
