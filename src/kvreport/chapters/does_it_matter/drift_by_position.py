"""Long texts, read in pieces on a cache: whether the distance to the baseline grows with the position.

The tokens are the text's own at every step (teacher forcing), so what grows here is drift, not the consequence of a
token that was chosen otherwise.

Rows, one a (model, dtype, way, sample, bin of positions): see ``data/README.md``.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kvbook import progress
from kvbook.measuring import predictions
from kvbook.models import corpus, loading
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvbook.runs.work import Work
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter import variants
from kvreport.chapters.does_it_matter.rows import LONG_AT_ONCE
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings

# Bins of positions from the first token to the last.
BINS = 16
CHUNKS = variants.Variant(named.LONG_CHUNKS, variants.on_a_cache(variants.dynamic, LONG_AT_ONCE))
VARIANTS = (CHUNKS, variants.KV_INT8, variants.WEIGHTS_4)


def length(settings: DoesItMatterSettings) -> int:
    """Give the number of tokens read of each text: what is asked for, and no more than the model's context."""
    limit = loading.identify(settings.model, settings.weights, settings.seed)["context_length"]
    return settings.longest if limit is None else min(settings.longest, limit)


def inputs(settings: DoesItMatterSettings) -> dict[str, Any]:
    """Name the model and the corpus, and refuse what cannot be run."""
    return variants.inputs(settings, length(settings), settings.n_long, length(settings))


def measure(settings: DoesItMatterSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Follow the drift along every text."""
    samples = variants.texts(settings, settings.n_long, length(settings))
    for dtype in settings.dtypes:
        subject = variants.Subject(settings, dtype)
        for sample in progress.track(samples, len(samples), f"drift along the text, {dtype}: text"):
            if (unit := f"{dtype}|{sample.index}") in writer.done:
                continue
            about = {
                "model": subject.baseline.name, "weights": subject.baseline.weights, "dtype": dtype,
                "sample": sample.index, "source": sample.source,
            }
            writer.append(unit, [about | row for row in follow(subject, sample)])


def follow(subject: variants.Subject, sample: corpus.Sample) -> Iterator[dict[str, Any]]:
    """Hold the ways against the baseline along one text, added up in bins of positions."""
    text = subject.tensor([sample.ids])
    ids, targets = text[:, :-1], text[0, 1:]
    # What is fed first is a sixteenth too: everything behind it is on a cache.
    size = max(1, ids.shape[1] // BINS)
    with torch.inference_mode():
        baseline = next(variants.whole(variants.Reader(subject.baseline.model), ids, size)).logits
        for way in variants.possible(subject.baseline.model, VARIANTS):
            sums: dict[int, list[float]] = {}
            for piece in subject.pieces(way, ids, size):
                rows = slice(piece.start, piece.start + len(piece.logits))
                found = predictions.compare(baseline[rows], piece.logits, targets[rows])
                kept = zip(range(rows.start, rows.stop), found.kl.tolist(), found.flip.tolist(), strict=True)
                for position, kl, flip in kept:
                    if position >= size:
                        place = sums.setdefault(min(position // size, BINS - 1), [0.0, 0.0, 0.0])
                        for index, value in enumerate((1.0, kl, flip)):
                            place[index] += value
            for place, (count, kl, flips) in sorted(sums.items()):
                yield {
                    "way": way.name, "bin": place, "read_from": place * size,
                    "read_to": ids.shape[1] if place == BINS - 1 else (place + 1) * size, "n_tokens": int(count),
                    "kl": kl / count, "flips": int(flips),
                }


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    return Work(settings.longest, (1 + len(VARIANTS)) * settings.n_long, dtypes=settings.dtypes, copies=2)


EXPERIMENT = Experiment(
    "drift_by_position", DoesItMatterSettings, inputs, measure, fields=variants.FIELDS | {"longest", "n_long"},
    work=work,
)
