"""Texts as long as a model's context, in one pass and in pieces on a cache, both held against fp64 by position.

Every piece has 256 tokens; what is read first is not scored.  Positions fall into half octaves, so that texts of all
lengths meet in the first ones.  Of each at most 64 positions are scored, evenly spread: the output head reads those
alone, and the logits of a whole text are never there.  The reference has the weights of the dtype under test.

Rows, one a (model, dtype, sample, bin of positions): see ``data/README.md``.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbook.errors import UserError
from kvbook.measuring import caches, fp64_reference, predictions
from kvbook.measuring.in_fp64 import widened
from kvbook.models import corpus, loading, placement
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvbook.runs.work import Work
from kvreport.chapters.does_it_matter import variants
from kvreport.chapters.does_it_matter.rows import PIECE
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


def inputs(settings: DoesItMatterSettings) -> dict[str, Any]:
    """Name the model and the corpus, and refuse what cannot be run."""
    placement.dtype_on("float64", placement.device_of(settings.device))
    cut = texts(settings)
    return variants.inputs(settings, len(cut[0].ids), 1, len(cut[0].ids))


def measure(settings: DoesItMatterSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Read every text on both paths and in fp64."""
    samples = texts(settings)
    for dtype in settings.dtypes:
        subject = variants.Subject(settings, dtype)
        units = {f"{dtype}|{sample.index}": sample for sample in samples}
        reference = fp64_reference.in_double_precision(subject.baseline.model)
        for unit, sample in writer.pending(units, f"long contexts, {dtype}: text"):
            about = subject.about | {"sample": sample.index, "source": sample.source, "length": len(sample.ids)}
            rows = follow(subject.baseline.model, reference, subject.tensor([sample.ids]))
            writer.append(unit, [about | row for row in rows])


def follow(model: PreTrainedModel, reference: PreTrainedModel, text: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Hold both paths along one text against each other and the reference, bin by bin."""
    ids, targets = text[:, :-1], text[0, 1:]
    n_tokens = ids.shape[1]
    piece = min(PIECE, text.shape[1] // 4)
    n_bins = round(2 * math.log2(n_tokens / piece))
    edges = [round(piece * 2 ** (place / 2)) for place in range(n_bins)] + [n_tokens]
    with torch.inference_mode():
        with widened(torch.float64):
            true = _states(reference, ids)
        full, cached = _states(model, ids), _states(model, ids, piece)
        for place, (begin, end) in enumerate(itertools.pairwise(edges)):
            at = torch.linspace(begin, end - 1, min(SCORED, end - begin), dtype=torch.float64).long()
            whole, pieces = (model.get_output_embeddings()(states[at]) for states in (full, cached))
            exact = reference.get_output_embeddings()(true[at])
            drift, of_full, of_cached = (
                predictions.compare(*pair, targets[at]) for pair in ((whole, pieces), (exact, whole), (exact, pieces))
            )
            errors = fp64_reference.errors(exact, whole, pieces, pooled=True)
            yield {
                "bin": place, "read_from": begin, "read_to": end, "n_tokens": len(at), "kl": drift.kl.mean().item(),
                "kl_full": of_full.kl.mean().item(), "kl_cached": of_cached.kl.mean().item(),
                "flips": int(drift.flip.sum()), "error_full": errors.first.item(), "error": errors.second.item(),
                "drift": errors.apart.item(),
            }


def _states(model: PreTrainedModel, ids: torch.Tensor, piece: int | None = None) -> torch.Tensor:
    """Return what the output head reads, of one pass without a cache or of pieces on one."""
    if piece is None:
        return model.base_model(ids, use_cache=False).last_hidden_state[0]
    cache = caches.make("dynamic", model.config, ids.shape[1])
    parts = (model.base_model(part, past_key_values=cache, use_cache=True) for part in ids.split(piece, 1))
    return torch.cat([part.last_hidden_state[0] for part in parts])


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype, as passes over the longest text."""
    passes = sum(settings.text_lengths) / max(settings.text_lengths)
    return Work(max(settings.text_lengths), 2 * passes, dtypes=settings.dtypes, in_fp64=passes)


EXPERIMENT = Experiment(
    "long_contexts", DoesItMatterSettings, inputs, measure, fields=variants.FIELDS | {"text_lengths"}, work=work
)
