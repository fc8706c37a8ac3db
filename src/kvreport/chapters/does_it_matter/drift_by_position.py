"""Long texts, read in pieces on a cache: whether the distance to the baseline grows with the position.

The tokens are the text's own at every step (teacher forcing), so what grows here is drift, not the consequence of a
token that was chosen otherwise.

Rows, one a (model, dtype, way, sample, bin of positions): see ``data/README.md``.
"""


import torch

from kvbook.measuring import predictions
from kvbook.models import corpus, loading
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter import variants
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings

# Bins of positions from the first token to the last.
BINS = 16
CHUNKS = variants.Variant(named.LONG_CHUNKS, variants.on_a_cache(variants.dynamic, named.LONG_AT_ONCE))
VARIANTS = (CHUNKS, variants.KV_INT8, variants.WEIGHTS_4)


def length(settings: DoesItMatterSettings) -> int:
    """Return the number of tokens read of each text: what is asked for, and no more than the model's context."""
    limit = loading.identify(settings.model, settings.weights, settings.seed)["context_length"]
    return settings.longest if limit is None else min(settings.longest, limit)


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    return variants.inputs(settings, length(settings), settings.n_long, length(settings))


def measure(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Follow the drift along every text."""
    samples = variants.texts(settings, settings.n_long, length(settings))
    variants.follow_all(settings, writer, samples, "drift along the text", follow)


def follow(subject: variants.Subject, sample: corpus.Sample) -> Rows:
    """Hold the ways against the baseline along one text, added up in bins of positions."""
    text = subject.tensor([sample.ids])
    ids, targets = text[:, :-1], text[0, 1:]
    n_tokens = ids.shape[1]
    # What is fed first is a sixteenth too: everything after it is on a cache.
    size = max(1, n_tokens // BINS)
    begins = range(size, n_tokens, size)[: BINS - 1]
    baseline = next(variants.whole(subject.baseline.model, ids, size)).logits
    for way in variants.possible(subject.baseline.model, VARIANTS):
        kl, flips = torch.zeros(2, n_tokens, dtype=torch.float64)
        for piece in subject.pieces(way, ids, size):
            rows = slice(piece.start, piece.start + len(piece.logits))
            found = predictions.compare(baseline[rows], piece.logits, targets[rows])
            kl[rows], flips[rows] = found.kl.cpu(), found.flip.cpu()
        for place, begin in enumerate(begins, 1):
            end = n_tokens if begin == begins[-1] else begin + size
            yield {
                "way": way.name, "bin": place, "read_from": begin, "read_to": end, "n_tokens": end - begin,
                "kl": sum(kl[begin:end].tolist()) / (end - begin), "flips": int(flips[begin:end].sum()),
            }


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    return Work(settings.longest, (1 + len(VARIANTS)) * settings.n_long, dtypes=settings.dtypes, copies=2)


EXPERIMENT = Experiment(
    "drift_by_position", DoesItMatterSettings, inputs, measure, variants.FIELDS | {"longest", "n_long"}, work=work
)
