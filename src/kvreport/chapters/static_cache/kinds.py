"""What each kind of cache holds, and what is written with it: shapes step by step, bytes at the peak, and a text.

The shapes are those of the document's loops, written for the cache classes of today, from the ids that it prints of its
prompt.  It printed the shape of the ids behind a step without a cache, and of the keys behind a step with one;
``len(keys[0])``, which it took for the length, is printed too.

Bytes are counted at the peak of generating a few tokens after a prompt of a given length, the counter reset before each
kind of cache.  On a CPU it sees the whole process, so the bytes in use just before are noted beside it.

The text is written greedily from the document's prompt, with weights that have learnt something.  After the first token
that differs two texts go their own ways, so what is told there is the margin: how close the second choice was without a
cache.

Rows, one a (cache, step), one a (cache, length), and one a (dtype, cache, step): see ``data/README.md``.
"""

import gc
import itertools

import torch
from transformers import PreTrainedModel

from kvbook import progress
from kvbook.measuring import caches, choosing, memory
from kvbook.models import kept, loading, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.static_cache import FIELDS, StaticCacheSettings, subject
from kvreport.chapters.static_cache.rows import DOCUMENT, KINDS
from kvreport.publishing import documents

# The document's number of steps, and the room that it gave the static cache (a model with a smaller context gets that).
N_STEPS, ROOM = 5, 1024
# Tokens after the prompt where bytes are counted.
_N_NEW = 4


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
    model, config = loaded.model, loaded.model.config
    room, per_token = min(ROOM, loading.context_length(config) or ROOM), memory.kv_bytes_per_token(config, model.dtype)
    # A smaller vocabulary lacks some of the document's ids; the shapes depend on their number alone.
    ids = torch.tensor([made_of["ids"]], device=model.device) % config.vocab_size
    none = {"keys_shape": "", "first_dimension": "", "cached_tokens": 0, "kv_bytes": 0, "predicted_bytes": 0}
    for kind in KINDS:
        cache = None if kind == "none" else caches.make(kind, config, room)
        for step, (fed, _, _) in enumerate(choosing.written(model, ids, N_STEPS, cache)):
            row = {"cache": kind, "step": step, "fed": "x".join(map(str, fed.shape))} | none
            if cache is not None:
                keys = cache.layers[0].keys
                row |= {
                    "keys_shape": "x".join(map(str, keys.shape)), "first_dimension": len(keys),
                    "cached_tokens": caches.length(cache), "kv_bytes": memory.cache_bytes(cache),
                    "predicted_bytes": per_token * keys.shape[-2],
                }
            yield row


EXPERIMENT = Experiment("static_shapes", StaticCacheSettings, inputs, measure, fields=FIELDS | {"prompt"})


def lengths(settings: StaticCacheSettings) -> tuple[int, ...]:
    """Return the numbers of tokens at which memory is measured: the run's own, and multiples of it."""
    return tuple(settings.n_new_tokens * times for times in (1, 2, 4))


@subject.measured_at_once
def measure_memory(settings: StaticCacheSettings, made_of: Inputs, loaded: loading.Loaded) -> Rows:
    """Count bytes at every length, with each kind of cache."""
    model, device = loaded.model, loaded.model.device
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    limit = made_of["models"][0]["context_length"] or max(lengths(settings))
    turns = list(itertools.product(sorted({min(length, limit) for length in lengths(settings)}), KINDS))
    # Buffers that the longest passes make must not be counted as one cache's.
    for kind in ("none", "static"):
        _generate(model, turns[-1][0], kind)
    # What there is by now lives on: each measurement looks for garbage first, which takes long among so much.
    gc.collect()
    gc.freeze()
    per_token = memory.kv_bytes_per_token(model.config, model.dtype)
    try:
        for length, kind in progress.track(turns, label="memory: length and cache"):
            before = memory.peak(lambda: None, device)[1]
            held, peak = memory.peak(lambda length=length, kind=kind: _generate(model, length, kind), device)
            yield {
                "cache": kind, "n_tokens": length, "kv_bytes": held,
                "predicted_bytes": 0 if kind == "none" else length * per_token,
                "weights_bytes": weights_bytes, "before_bytes": before, "peak_bytes": peak,
            }
    finally:
        gc.unfreeze()


def _generate(model: PreTrainedModel, length: int, kind: str) -> int:
    """Fill `length` places, the last ones token by token; give the bytes of the cache."""
    ids = (torch.arange(length - _N_NEW, device=model.device)[None] + 3) % model.config.vocab_size
    cache = None if kind == "none" else caches.make(kind, model.config, length)
    # With a cache the last token is fed too, which fills it.
    for _ in choosing.written(model, ids, _N_NEW + (cache is not None), cache, logits_to_keep=1):
        pass
    return 0 if cache is None else memory.cache_bytes(cache)


def work_of_memory(settings: StaticCacheSettings) -> Work:
    """Count the passes of each model in each dtype."""
    return Work(max(lengths(settings)), 2 * len(lengths(settings)) * (_N_NEW + 2), dtypes=(settings.dtype,))


MEMORY = Experiment(
    "static_memory", StaticCacheSettings, subject.inputs, measure_memory, fields=FIELDS | {"n_new_tokens"},
    work=work_of_memory,
)


def _weights(settings: StaticCacheSettings) -> str:
    """Choose the weights that write: random ones write nothing that a reader could compare."""
    return "stand-in" if settings.weights == "random" else settings.weights


def _dtypes(settings: StaticCacheSettings) -> tuple[str, ...]:
    return tuple(dict.fromkeys((settings.dtype, "float32")))


def inputs_of_texts(settings: StaticCacheSettings) -> Inputs:
    """Name the model, and refuse what cannot be run."""
    placement.check(settings.device, _dtypes(settings))
    model = loading.identify(settings.text_model, _weights(settings), settings.seed)
    tokenizer = kept.tokenizer(settings.text_model, _weights(settings))
    loading.check_length(model, len(tokenizer(settings.prompt)["input_ids"]) + settings.n_new_tokens, "n_new_tokens")
    return {"models": [model | {"asked_for": settings.text_model}]}


def measure_texts(settings: StaticCacheSettings, _made_of: Inputs, writer: Writer) -> None:
    """Write the text in every dtype and way."""
    for dtype, _ in writer.pending(dict.fromkeys(_dtypes(settings)), "texts: dtype"):
        loaded = loading.load(
            settings.text_model, weights=_weights(settings), dtype=dtype, device=settings.device, seed=settings.seed
        )
        ids = subject.prompt(settings, loaded)
        writer.keep(dtype, loaded.about, (
            {"cache": way, "step": step, "text": loaded.tokenizer.decode(row["token"])} | row
            for way in progress.track(KINDS, label=f"texts, {dtype}: way")
            for step, row in enumerate(_write(loaded.model, ids, way, settings.n_new_tokens))
        ))


def _write(model: PreTrainedModel, ids: torch.Tensor, way: str, n_new: int) -> Rows:
    cache = None if way == "none" else caches.make(way, model.config, ids.shape[1] + n_new)
    for _, logits, token in choosing.written(model, ids, n_new, cache):
        row = logits[0].float()
        rms = row.square().mean().sqrt().item()
        yield {"token": token.item(), "margin": choosing.margin(row).item(), "logits_rms": rms}


def work_of_texts(settings: StaticCacheSettings) -> Work:
    """Count the passes of each model in each dtype."""
    return Work(max(1, settings.n_new_tokens // 2), settings.n_new_tokens, 2 * settings.n_new_tokens, _dtypes(settings))


TEXTS = Experiment(
    "static_texts", StaticCacheSettings, inputs_of_texts, measure_texts,
    fields=FIELDS - {"model"} | {"text_model", "prompt", "n_new_tokens"}, revision=2, work=work_of_texts,
)
