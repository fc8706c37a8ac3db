"""How many bytes generation takes at its peak, with each kind of cache, the counter reset before each.

Each row generates a few tokens behind a prompt of a given length.  On a CPU the counter sees the whole process, so the
bytes in use just before are noted beside it.  Rows, one a (cache, length): see ``data/README.md``.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from kvbook import progress
from kvbook.measuring import caches, memory
from kvbook.models import placement
from kvbook.runs import experiment as frame
from kvbook.runs import records
from kvreport.chapters.static_cache import speed as static_speed
from kvreport.chapters.static_cache.settings import StaticCacheSettings

# Tokens behind the prompt.
_N_NEW = 4


def lengths(settings: StaticCacheSettings) -> tuple[int, ...]:
    """Give the numbers of tokens at which memory is measured: the run's own, and multiples of it."""
    return tuple(settings.n_new_tokens * times for times in (1, 2, 4))


def run(settings: StaticCacheSettings) -> records.Run:
    """Measure the bytes, or read them if these inputs have been measured.

    Raises
    ------
    UserError
        For settings that cannot be run.
    """
    model = static_speed.identify(settings)
    return frame.recorded(
        "static_memory",
        __name__,
        settings,
        lambda writer: _measure(settings, model, writer),
        fields={"model", "weights", "dtype", "device", "seed", "n_new_tokens"},
        models=[model],
    )


def _measure(settings: StaticCacheSettings, identity: dict[str, Any], writer: records.Writer) -> None:
    if "all" in writer.done:
        return
    device = placement.device_of(settings.device)
    loaded = static_speed.load(settings)
    model = loaded.model
    about = {"model": loaded.name, "weights": loaded.weights, "dtype": settings.dtype}
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    limit = identity["context_length"] or max(lengths(settings))
    turns = [
        (length, kind) for length in sorted({min(length, limit) for length in lengths(settings)})
        for kind in ("none", "dynamic", "static")
    ]  # fmt: skip
    rows = []
    with torch.inference_mode():
        # Buffers that the longest passes make must not be counted as one cache's.
        for kind in ("none", "static"):
            _generate(model, turns[-1][0], kind)
        for length, kind in progress.track(turns, label="memory: length and cache"):
            before = memory.peak(lambda: None, device)[1]
            held, peak = memory.peak(lambda length=length, kind=kind: _generate(model, length, kind), device)
            rows.append(
                about
                | {
                    "cache": kind, "n_tokens": length, "kv_bytes": held,
                    "predicted_bytes": 0 if kind == "none" else length * memory.kv_bytes_per_token(model.config, model.dtype),
                    "weights_bytes": weights_bytes, "before_bytes": before, "peak_bytes": peak,
                }
            )  # fmt: skip
    writer.append("all", rows)


def _generate(model: PreTrainedModel, length: int, kind: str) -> int:
    """Fill `length` places, the last ones token by token; give the bytes of the cache."""
    ids = (torch.arange(length - _N_NEW, device=model.device)[None] + 3) % model.config.vocab_size
    if kind == "none":
        for _ in range(_N_NEW):
            token = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], 1)
        return 0
    cache, fed = caches.make(kind, model.config, length), ids
    for _ in range(_N_NEW + 1):
        fed = model(fed, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    return memory.cache_bytes(cache)
