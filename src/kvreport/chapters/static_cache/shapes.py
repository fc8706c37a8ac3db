"""What goes into the model and what a cache holds, step by step: the growing and the preallocated shapes.

The document's loops again, written for the cache classes of today, from the ids that it prints of its prompt.  It
printed the shape of the ids behind a step without a cache, and of the keys behind a step with one; ``len(keys[0])``,
which it took for the length, is printed too.  Rows, one a (cache, step): see ``data/README.md``.
"""


import torch
from transformers import Cache, PreTrainedModel

from kvbook.measuring import caches, choosing, memory
from kvbook.models import kept, loading
from kvbook.runs import Experiment, Inputs, Rows
from kvreport.chapters.static_cache import subject
from kvreport.chapters.static_cache.rows import DOCUMENT, KINDS
from kvreport.chapters.static_cache.settings import FIELDS, StaticCacheSettings
from kvreport.publishing import documents

# The document's number of steps, and the room that it gave the static cache (a model with a smaller context gets that).
N_STEPS, ROOM = 5, 1024


def inputs(settings: StaticCacheSettings) -> Inputs:
    """Name the model and the ids, and refuse what cannot be run."""
    return subject.inputs(settings) | {"ids": _ids(settings)}


def _ids(settings: StaticCacheSettings) -> list[int]:
    """Return the document's ids of its own prompt, another prompt's as the tokenizer cuts it."""
    document = documents.published(DOCUMENT)
    if settings.prompt == document["prompt"]:
        return document["prompt_ids"]
    return list(kept.tokenizer(settings.model, subject.weights_of(settings))(settings.prompt)["input_ids"])


@subject.measured_at_once
def measure(_: StaticCacheSettings, made_of: Inputs, loaded: loading.Loaded) -> Rows:
    """Take the document's steps with each kind of cache."""
    config = loaded.model.config
    room = min(ROOM, loading.context_length(config) or ROOM)
    # A smaller vocabulary lacks some of the document's ids; the shapes depend on their number alone.
    ids = torch.tensor([made_of["ids"]], device=loaded.model.device) % config.vocab_size
    for kind in KINDS:
        yield from _steps(loaded.model, ids, kind, room)


def _steps(model: PreTrainedModel, ids: torch.Tensor, kind: str, room: int) -> Rows:
    per_token = memory.kv_bytes_per_token(model.config, model.dtype)
    cache: Cache | None = None if kind == "none" else caches.make(kind, model.config, room)
    for step, (fed, _, _) in enumerate(choosing.written(model, ids, N_STEPS, cache)):
        row = {"cache": kind, "step": step, "fed": "x".join(map(str, fed.shape))}
        if cache is None:
            yield row | {
                "keys_shape": "", "first_dimension": "", "cached_tokens": 0, "kv_bytes": 0, "predicted_bytes": 0
            }
        else:
            keys = cache.layers[0].keys
            yield row | {
                "keys_shape": "x".join(map(str, keys.shape)), "first_dimension": len(keys),
                "cached_tokens": caches.length(cache), "kv_bytes": memory.cache_bytes(cache),
                "predicted_bytes": per_token * keys.shape[-2],
            }


EXPERIMENT = Experiment("static_shapes", StaticCacheSettings, inputs, measure, fields=FIELDS | {"prompt"})
