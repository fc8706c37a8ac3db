"""What goes into the model and what a cache holds, step by step: the growing and the preallocated shapes.

The document's loops again, written for the cache classes of today, from the ids that it prints of its prompt.  It
printed the shape of the ids behind a step without a cache, and of the keys behind a step with one; ``len(keys[0])``,
which it took for the length, is printed too.  Rows, one a (cache, step): see ``data/README.md``.
"""

from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvbook.measuring import caches, choosing, memory
from kvbook.models import loading
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvreport.chapters.static_cache import subject
from kvreport.chapters.static_cache.settings import StaticCacheSettings
from kvreport.publishing import documents

# The document's number of steps, and the room that it gave the static cache (a model with a smaller context gets that).
N_STEPS, ROOM = 5, 1024


def inputs(settings: StaticCacheSettings) -> dict[str, Any]:
    """Name the model and the ids, and refuse what cannot be run."""
    return {"models": [subject.identify(settings)], "ids": _ids(settings)}


def _ids(settings: StaticCacheSettings) -> list[int]:
    """Give the document's ids of its own prompt, another prompt's as the tokenizer cuts it."""
    document = documents.published("notebook-static")
    if settings.prompt == document["prompt"]:
        return document["prompt_ids"]
    return list(loading.tokenizer(settings.model, subject.weights_of(settings))(settings.prompt)["input_ids"])


def measure(settings: StaticCacheSettings, made_of: dict[str, Any], writer: records.Writer) -> None:
    """Take the document's steps with each kind of cache."""
    if "all" in writer.done:
        return
    loaded = subject.load(settings)
    room = min(ROOM, loading.context_length(loaded.model.config) or ROOM)
    # A smaller vocabulary lacks some of the document's ids; the shapes depend on their number alone.
    ids = torch.tensor([made_of["ids"]], device=loaded.model.device) % loaded.model.config.vocab_size
    about = {"model": loaded.name, "weights": loaded.weights, "dtype": settings.dtype}
    with torch.inference_mode():
        rows = [about | row for kind in ("none", "dynamic", "static") for row in _steps(loaded.model, ids, kind, room)]
    writer.append("all", rows)


def _steps(model: PreTrainedModel, ids: torch.Tensor, kind: str, room: int) -> list[dict[str, Any]]:
    per_token = memory.kv_bytes_per_token(model.config, model.dtype)
    cache: Cache | None = None if kind == "none" else caches.make(kind, model.config, room)
    rows, fed = [], ids
    for step in range(N_STEPS):
        options = {"use_cache": False} if cache is None else {"past_key_values": cache}
        token = choosing.greedy(model(fed, **options).logits[:, -1:])
        row = {"cache": kind, "step": step, "fed": "x".join(map(str, fed.shape))}
        if cache is None:
            fed = torch.cat([fed, token], 1)
            held = {"keys_shape": "", "first_dimension": "", "cached_tokens": 0, "kv_bytes": 0, "predicted_bytes": 0}
        else:
            fed = token
            keys = cache.layers[0].keys
            held = {
                "keys_shape": "x".join(map(str, keys.shape)), "first_dimension": len(keys),
                "cached_tokens": caches.length(cache), "kv_bytes": memory.cache_bytes(cache),
                "predicted_bytes": per_token * keys.shape[-2],
            }
        rows.append(row | held)
    return rows


EXPERIMENT = Experiment(
    "static_shapes", StaticCacheSettings, inputs, measure,
    fields=frozenset({"model", "weights", "dtype", "device", "seed", "prompt"}),
)
