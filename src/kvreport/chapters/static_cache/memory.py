"""How many bytes generation takes at its peak, with each kind of cache, the counter reset before each.

Each row generates a few tokens after a prompt of a given length.  On a CPU the counter sees the whole process, so the
bytes in use just before are noted beside it.  Rows, one a (cache, length): see ``data/README.md``.
"""

import itertools

import torch
from transformers import PreTrainedModel

from kvbook import progress
from kvbook.measuring import caches, choosing, memory
from kvbook.models import loading
from kvbook.runs import Experiment, Inputs, Rows, Work
from kvreport.chapters.static_cache import subject
from kvreport.chapters.static_cache.rows import KINDS
from kvreport.chapters.static_cache.settings import FIELDS, StaticCacheSettings

# Tokens after the prompt.
_N_NEW = 4


def lengths(settings: StaticCacheSettings) -> tuple[int, ...]:
    """Return the numbers of tokens at which memory is measured: the run's own, and multiples of it."""
    return tuple(settings.n_new_tokens * times for times in (1, 2, 4))


@subject.measured_at_once
def measure(settings: StaticCacheSettings, made_of: Inputs, loaded: loading.Loaded) -> Rows:
    """Count bytes at every length, with each kind of cache."""
    model, device = loaded.model, loaded.model.device
    per_token = memory.kv_bytes_per_token(model.config, model.dtype)
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    limit = made_of["models"][0]["context_length"] or max(lengths(settings))
    turns = list(itertools.product(sorted({min(length, limit) for length in lengths(settings)}), KINDS))
    # Buffers that the longest passes make must not be counted as one cache's.
    for kind in ("none", "static"):
        _generate(model, turns[-1][0], kind)
    for length, kind in progress.track(turns, label="memory: length and cache"):
        before = memory.peak(lambda: None, device)[1]
        held, peak = memory.peak(lambda length=length, kind=kind: _generate(model, length, kind), device)
        yield {
            "cache": kind, "n_tokens": length, "kv_bytes": held,
            "predicted_bytes": 0 if kind == "none" else length * per_token,
            "weights_bytes": weights_bytes, "before_bytes": before, "peak_bytes": peak,
        }


def _generate(model: PreTrainedModel, length: int, kind: str) -> int:
    """Fill `length` places, the last ones token by token; give the bytes of the cache."""
    ids = (torch.arange(length - _N_NEW, device=model.device)[None] + 3) % model.config.vocab_size
    cache = None if kind == "none" else caches.make(kind, model.config, length)
    # With a cache the last token is fed too, which fills it.
    for _ in choosing.written(model, ids, _N_NEW + (cache is not None), cache, logits_to_keep=1):
        pass
    return 0 if cache is None else memory.cache_bytes(cache)


def work(settings: StaticCacheSettings) -> Work:
    """Count the passes of each model in each dtype."""
    return Work(max(lengths(settings)), 2 * len(lengths(settings)) * (_N_NEW + 2), dtypes=(settings.dtype,))


EXPERIMENT = Experiment(
    "static_memory", StaticCacheSettings, subject.inputs, measure, fields=FIELDS | {"n_new_tokens"}, work=work
)
