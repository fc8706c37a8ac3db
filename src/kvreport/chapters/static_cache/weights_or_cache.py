"""When reading the cache takes longer than reading the weights: steps of the stock model by dtype, batch and context.

A step reads every weight once, whatever the batch, and each sequence's keys and values.  The cache is static and filled
with random numbers, which take as long to read as a text's.  Rows, one a (dtype, batch, context, step): see
``data/README.md``.
"""

import itertools

import torch
from transformers import PreTrainedModel, StaticCache

from kvbook import progress
from kvbook.measuring import memory, timing
from kvbook.models import placement
from kvbook.runs import Experiment, Inputs, Work, Writer
from kvreport.chapters.static_cache import FIELDS, StaticCacheSettings, subject
from kvreport.chapters.static_cache.rows import BATCHES

DTYPES = ("float32", "float16", "bfloat16")
_STEPS = 11


def inputs(settings: StaticCacheSettings) -> Inputs | None:
    """Name the model, and refuse a dtype that the device has not; None where no context is asked for."""
    if not settings.contexts:
        return None
    placement.check(settings.device, DTYPES)
    return subject.inputs(settings)


def measure(settings: StaticCacheSettings, made_of: Inputs, writer: Writer) -> None:
    """Time some steps at each dtype, batch and context; a dtype is a unit."""
    most = made_of["models"][0]["context_length"] or max(settings.contexts) + _STEPS
    contexts = sorted({min(context, most - _STEPS) for context in settings.contexts})
    for dtype, _ in writer.pending(dict.fromkeys(DTYPES), "weights or cache: dtype"):
        loaded = subject.load(settings.model_copy(update={"dtype": dtype}))
        weights_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
        per_token = memory.kv_bytes_per_token(loaded.model.config, loaded.model.dtype)
        cells = list(itertools.product(BATCHES, contexts))
        writer.keep(dtype, loaded.about, (
            {
                "batch": batch, "context": context, "step": step, "seconds": seconds,
                "weights_bytes": weights_bytes, "kv_bytes": batch * context * per_token,
            }
            for batch, context in progress.track(cells, label="batch and context")
            for step, seconds in enumerate(_steps(loaded.model, batch, context))
        ))


def _steps(model: PreTrainedModel, batch: int, context: int) -> list[float]:
    """Time steps that attend to so many tokens, the first left out."""
    cache = StaticCache(config=model.config, max_cache_len=context + _STEPS)
    token = torch.full((batch, 1), 3, device=model.device)
    # Makes the tensors.
    model(token, past_key_values=cache)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(context - 1)
    times = [
        timing.timed(lambda: model(token, past_key_values=cache, logits_to_keep=1), model.device)[1]
        for _ in range(_STEPS)
    ]
    return times[1:]


def work(settings: StaticCacheSettings) -> Work:
    """Count the steps; a batch counts as its sequences."""
    return Work(max(settings.contexts, default=1), 0, len(settings.contexts) * sum(BATCHES) * (_STEPS + 1), DTYPES)


EXPERIMENT = Experiment(
    "weights_or_cache", StaticCacheSettings, inputs, measure, FIELDS - {"dtype"} | {"contexts"}, timed=True, work=work
)
