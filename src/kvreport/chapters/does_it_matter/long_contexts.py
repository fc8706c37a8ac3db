"""Long texts, in one pass and in pieces on caches, and past a window that slides along them: what grows along a text.

The tokens are the text's own at every step (teacher forcing), so what grows here is drift, not the consequence of a
token that was chosen otherwise.

Of texts as long as a model's context every piece has 256 tokens; what is read first is not scored.  Positions fall into
half octaves, so that texts of all lengths meet in the first ones.  Of each at most 64 positions are scored, evenly
spread: the output head reads those alone, and the logits of a whole text are never there.  Passes over a whole text are
held against fp64; that reference has the weights of the dtype under test.

A window has four pieces, or half of a shorter text.  The tokens of a piece see each other and the pieces before them
that the window holds.  Read anew, keys and values know of nothing outside it; on a cache that forgets its oldest
tokens they were computed while those were still seen.  A cache's positions are those in the text.

Rows of all three experiments, one a (model, dtype, sample, way, bin of positions): see ``data/README.md``.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvbook import UserError
from kvbook.measuring import caches, fp64_reference, in_fp64, predictions
from kvbook.models import corpus, loading, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.does_it_matter import DoesItMatterSettings, variants
from kvreport.chapters.does_it_matter import rows as named

# Positions of a bin that are scored.
SCORED = 64
# Bins of positions of the shorter texts, from the first token to the last.
BINS = 16
CHUNKS = variants.Variant(named.LONG_CHUNKS, variants.on_a_cache(variants.dynamic, named.LONG_AT_ONCE))
VARIANTS = (CHUNKS, variants.KV_INT8, variants.WEIGHTS_4)


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
    return inputs_of_windows(settings)


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
    with in_fp64.widened(torch.float64):
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


def inputs_of_windows(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    longest = len(texts(settings)[0].ids)
    return variants.inputs(settings, longest, 1, longest)


def measure_windows(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Read every text whole, in windows and on caches."""
    variants.follow_all(settings, writer, texts(settings), "sliding windows", follow_windows)


def follow_windows(subject: variants.Subject, sample: corpus.Sample) -> Rows:
    """Score one text past its first window in every way, each held against the window that is read anew."""
    model, text = subject.baseline.model, subject.tensor([sample.ids])
    ids, targets = text[:, :-1], text[0, 1:]
    piece = min(named.PIECE, text.shape[1] // (2 * named.PIECES))
    window = named.PIECES * piece
    read = {named.WHOLE: states(model, ids)}
    read |= {way: _kept(model, ids, piece, kept) for way, kept in named.FORGETTING.items()}
    ends = range(window + piece, len(targets) + piece, piece)
    anew = (states(model, ids[:, end - window : end])[window - piece :] for end in ends)
    read[named.ANEW] = torch.cat([states(model, ids[:, :window]), *anew])
    for place, (begin, end, at) in enumerate(bins(window, len(targets))):
        logits = {way: model.get_output_embeddings()(found[at]) for way, found in read.items()}
        for way, others in logits.items():
            found = predictions.compare(logits[named.ANEW], others, targets[at])
            yield {
                "length": text.shape[1], "way": way, "bin": place, "read_from": begin, "read_to": end,
                "n_tokens": len(at), "kl": found.kl.mean().item(), "nll": (found.nll - found.dlogp).mean().item(),
            }


def _kept(model: PreTrainedModel, ids: torch.Tensor, piece: int, kept: slice) -> torch.Tensor:
    """Read a text on a cache that makes room for each piece: it keeps some of the first tokens and the last ones."""
    cache, found = DynamicCache(config=model.config), []
    for places in torch.arange(ids.shape[1], device=ids.device)[None].split(piece, 1):
        kept = _forget(cache, kept, (named.PIECES - 1) * piece)
        found.append(states(model, ids[:, places[0]], past_key_values=cache, **variants.positions(model, places)))
    return torch.cat(found)


def _forget(cache: Cache, kept: slice, n_tokens: int) -> slice:
    """Make room where a cache holds more than so many tokens, and say where those that it is to keep stand then."""
    if (over := cache.get_seq_length() - n_tokens) <= 0:
        return kept
    count = kept.stop - kept.start
    for layer in cache.layers:
        layer.keys, layer.values = (
            torch.cat([of[:, :, kept], of[:, :, over + count :]], 2) for of in (layer.keys, layer.values)
        )
    return slice(0, count)


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype, as passes over the longest text."""
    passes = _over_longest(settings)
    return Work(max(settings.text_lengths), (1 + len(named.LONG_WAYS)) * passes, dtypes=settings.dtypes, in_fp64=passes)


def work_of_windows(settings: DoesItMatterSettings) -> Work:
    """Count the passes likewise; each piece but the first ones is read with the window before it."""
    passes = (1 + len(named.FORGETTING) + named.PIECES) * _over_longest(settings)
    return Work(max(settings.text_lengths), passes, dtypes=settings.dtypes)


def _over_longest(settings: DoesItMatterSettings) -> float:
    return sum(settings.text_lengths) / max(settings.text_lengths)


_FIELDS = variants.FIELDS | {"text_lengths"}
EXPERIMENT = Experiment("long_contexts", DoesItMatterSettings, inputs, measure, fields=_FIELDS, work=work)
WINDOWS = Experiment(
    "sliding_windows", DoesItMatterSettings, inputs_of_windows, measure_windows, fields=_FIELDS, work=work_of_windows
)


def length(settings: DoesItMatterSettings) -> int:
    """Return the number of tokens read of each text: what is asked for, and no more than the model's context."""
    limit = loading.identify(settings.model, settings.weights, settings.seed)["context_length"]
    return settings.longest if limit is None else min(settings.longest, limit)


def inputs_of_drift(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    return variants.inputs(settings, length(settings), settings.n_long, length(settings))


def measure_drift(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Follow the drift along every text."""
    samples = variants.texts(settings, settings.n_long, length(settings))
    variants.follow_all(settings, writer, samples, "drift along the text", follow_drift)


def follow_drift(subject: variants.Subject, sample: corpus.Sample) -> Rows:
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


def work_of_drift(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    return Work(settings.longest, (1 + len(VARIANTS)) * settings.n_long, dtypes=settings.dtypes, copies=2)


DRIFT = Experiment(
    "drift_by_position", DoesItMatterSettings, inputs_of_drift, measure_drift,
    fields=variants.FIELDS | {"longest", "n_long"}, work=work_of_drift,
)
