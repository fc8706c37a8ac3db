"""What the switch costs at a true shape: prefill and decode steps, stock and row-invariant by turns in one run.

Speed does not depend on the weights' values, so they are random.  A prefill runs the body, and then the head on a copy
of the last row: the library hands its head a view with the whole text's strides, for which a library of products may
take a path many times slower, so that stock's time would be the view's.  Rows, one a (repeat, arithmetic): see
``data/README.md``.
"""


import torch
from transformers import DynamicCache, PreTrainedModel

from kvbook import UserError
from kvbook.measuring import timing
from kvbook.models import loading, placement, registry
from kvbook.runs import Experiment, Inputs, Writer
from kvreport.chapters.exact_caches import ExactCachesSettings, paths
from kvreport.chapters.exact_caches.rows import ARITHMETICS


def inputs(settings: ExactCachesSettings) -> Inputs:
    """Name the shape, and refuse what cannot be run."""
    placement.device_of(settings.device)
    if settings.cost_shape not in registry.families():
        raise UserError(f"cost_shape {settings.cost_shape!r}: choose one of {', '.join(registry.families())}")
    model = loading.identify(settings.cost_shape, "random", settings.seed)
    loading.check_length(model, max(settings.n_prefill, settings.n_context + settings.n_steps))
    return {"models": [model]}


def measure(settings: ExactCachesSettings, _made_of: Inputs, writer: Writer) -> None:
    """Time both arithmetics by turns."""
    model = _blank(settings)
    ids = torch.arange(3, 3 + max(settings.n_prefill, settings.n_context + settings.n_steps))[None]
    ids = (ids % model.config.vocab_size).to(model.device)
    # The first turn of each is not kept: kernels are compared, buffers and code paths warmed up.
    repeats = {str(repeat): repeat for repeat in range(-1, settings.n_repeats)}
    for unit, repeat in writer.pending(repeats, "cost of the switch: repeat"):
        order = ARITHMETICS[:: 1 if repeat % 2 else -1]
        rows = [
            {"repeat": repeat, "source": repeat, "sample": repeat, "arithmetic": arithmetic}
            | turn(model, ids, settings, arithmetic) for arithmetic in order
        ]
        if repeat >= 0:
            writer.append(unit, rows)


def _blank(settings: ExactCachesSettings) -> PreTrainedModel:
    place = {"dtype": settings.cost_dtype, "device": settings.device}
    return loading.load(settings.cost_shape, weights="random", seed=settings.seed, **place).model


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Fill a new cache with a text and score its last token, with strides that any product takes fast."""
    last = model.base_model(ids, use_cache=True).last_hidden_state[:, -1:]
    # `contiguous` would keep the strides of a single row.
    return model.get_output_embeddings()(last.clone(memory_format=torch.contiguous_format))


def turn(model: PreTrainedModel, ids: torch.Tensor, settings: ExactCachesSettings, arithmetic: str) -> dict[str, float]:
    """Time a prefill and a few decode steps in one arithmetic."""
    with torch.inference_mode(), paths.switched(arithmetic):
        _, prefill_s = timing.timed(lambda: prefill(model, ids[:, : settings.n_prefill]), model.device)
        cache = DynamicCache(config=model.config)
        model(ids[:, : settings.n_context], past_key_values=cache, logits_to_keep=1)
        steps = []
        for step in range(settings.n_context, settings.n_context + settings.n_steps):
            token = ids[:, step : step + 1]
            steps.append(timing.timed(lambda token=token: model(token, past_key_values=cache), model.device)[1])
    # A single step that the system interrupted must not speak for the others.
    return {"prefill_s": prefill_s, "decode_s": sorted(steps)[len(steps) // 2]}


EXPERIMENT = Experiment(
    "exact_cost", ExactCachesSettings, inputs, measure, timed=True,
    fields=frozenset({"device", "seed", "n_repeats", "cost_shape", "cost_dtype", "n_prefill", "n_context", "n_steps"}),
)
