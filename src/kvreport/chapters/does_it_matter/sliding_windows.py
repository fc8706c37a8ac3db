"""Texts longer than a window of tokens: the window read anew, and caches that forget their oldest tokens.

A window has four pieces of 256 tokens, or half of a shorter text.  The tokens of a piece see each other and the pieces
before them that the window holds.  Read anew, keys and values know of nothing outside the window; on a cache they were
computed while older tokens were still seen.  A cache's positions are those in the text.

Rows, one a (model, dtype, sample, way, bin of positions): see ``data/README.md``.
"""


import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvbook.measuring import predictions
from kvbook.models import corpus
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.does_it_matter import long_contexts, variants
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter.long_contexts import states
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    longest = len(long_contexts.texts(settings)[0].ids)
    return variants.inputs(settings, longest, 1, longest)


def measure(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Read every text whole, in windows and on caches."""
    variants.follow_all(settings, writer, long_contexts.texts(settings), "sliding windows", follow)


def follow(subject: variants.Subject, sample: corpus.Sample) -> Rows:
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
    for place, (begin, end, at) in enumerate(long_contexts.bins(window, len(targets))):
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
    passes = sum(settings.text_lengths) / max(settings.text_lengths)
    # Each piece but the first ones is read with the window before it.
    return Work(max(settings.text_lengths), (1 + len(named.FORGETTING) + named.PIECES) * passes, dtypes=settings.dtypes)


EXPERIMENT = Experiment(
    "sliding_windows", DoesItMatterSettings, inputs, measure, fields=long_contexts.EXPERIMENT.fields, work=work
)
