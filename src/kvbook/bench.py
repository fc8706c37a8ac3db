"""``make bench``: this project's speed, as ratios measured side by side in one run.

Wall times of a shared machine wander; the ratio of two pieces of work that take turns does not, or less.
"""

import statistics
from collections.abc import Callable

import pandas as pd
import torch

from kvbook import corpus, machine, progress, timing
from kvbook.experiments import layer_drift
from kvbook.models import loading

_SAMPLES = 40
_ROUNDS = 5


def documented_way(model: torch.nn.Module, samples: list[torch.Tensor]) -> dict[str, float]:
    """Measure drift as issue 25420's comment describes it: three forward passes a sample, a host copy a layer, means.

    Re-created from the description.  Gradients are left on, as the comment's script leaves them.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    samples : list of Tensor of int64, shape (1, seq_len)
        Texts.
    """
    largest: dict[str, list[float]] = {}
    for ids in samples:
        whole = model(ids, output_hidden_states=True)
        prefix = model(ids[:, :-1])
        step = model(ids[:, -1:], past_key_values=prefix.past_key_values, output_hidden_states=True)
        for layer, (one, other) in enumerate(zip(whole.hidden_states, step.hidden_states, strict=True)):
            difference = (one[:, -1] - other[:, -1]).abs().max()
            largest.setdefault(f"layer {layer}", []).append(difference.detach().cpu().item())
        difference = (whole.logits[0, -1] - step.logits[0, -1]).abs().max()
        largest.setdefault("logits", []).append(difference.detach().cpu().item())
    return {place: statistics.fmean(values) for place, values in largest.items()}


def our_way(model: torch.nn.Module, samples: list[torch.Tensor]) -> list[dict]:
    """Measure drift as the book does, every statistic of every sample kept."""
    with torch.inference_mode():
        return [row for ids in samples for row in layer_drift.compare(model, ids)]


def _ratios(
    first: Callable[[], object], second: Callable[[], object], device: torch.device, label: str
) -> tuple[list[float], list[float]]:
    """Time two pieces of work in turn; the first round only warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in progress.track(range(_ROUNDS + 1), label=label):
        for work, into in zip((first, second), times, strict=True):
            _, seconds = timing.timed(work, device)
            if turn:
                into.append(seconds)
    return times


def drift_harness(dtype: str) -> dict[str, str]:
    """Compare the two harnesses on one model, dtype and set of samples."""
    loaded = loading.load("llama", dtype=dtype)
    # As `from_pretrained` leaves it, which the described script does not change.
    loaded.model.requires_grad_(True)
    samples = [torch.tensor([sample.ids]) for sample in corpus.samples("stdlib", loaded.tokenizer, _SAMPLES, 64)]
    theirs, ours = _ratios(
        lambda: documented_way(loaded.model, samples),
        lambda: our_way(loaded.model, samples),
        loaded.model.device,
        f"drift harness, {dtype}: round",
    )
    ratios = sorted(their / our for their, our in zip(theirs, ours, strict=True))
    return {
        "what": f"documented way / drift harness, {dtype}",
        "ratio": f"{statistics.median(ratios):.2f}",
        "range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        "documented_ms_per_sample": f"{1000 * statistics.median(theirs) / _SAMPLES:.2f}",
        "harness_ms_per_sample": f"{1000 * statistics.median(ours) / _SAMPLES:.2f}",
        "machine": machine.device_name("cpu"),
    }


def table() -> pd.DataFrame:
    """Run every benchmark and give one table of ratios; above 1 the book is the faster one."""
    return pd.DataFrame([drift_harness(dtype) for dtype in ("float32", "bfloat16")])
