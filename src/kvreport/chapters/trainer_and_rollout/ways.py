"""The sampled texts once more, by other caches, batches, chunks and dtypes: what each changes in a log-probability.

Rows, one a token: see ``data/README.md``.
"""

import functools
from collections.abc import Callable

import pandas as pd
import torch
from transformers import PreTrainedModel, QuantizedCache

from kvbook.exact import row_invariant
from kvbook.measuring import choosing, rounded_caches
from kvbook.runs import Experiment, Inputs, Work, Writer, samples
from kvreport.chapters.trainer_and_rollout import rollouts, scoring
from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.chapters.trainer_and_rollout.settings import TrainerAndRolloutSettings

Score = Callable[[PreTrainedModel, str, torch.Tensor, int], scoring.Columns]


def _single(model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int) -> scoring.Columns:
    return scoring.joined([scoring.cached(model, way, one, prompt) for one in ids.split(1)])


def _rounded(bits: int) -> Score:
    # Keys and values are rounded as they enter, so that a single pass reads what a step would.
    return lambda model, way, ids, prompt: scoring.cached(
        model, way, ids, prompt, ids.shape[1], rounded_caches.make(model.config, bits, bits)
    )


def _fp8(model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int) -> scoring.Columns:
    return scoring.cached(model, way, ids, prompt, cache=QuantizedCache("fp8", config=model.config))


# Each with its dtype; None is the rollout's own.
SCORES: dict[str, tuple[str | None, Score]] = {
    named.SINGLE: (None, _single), named.CHUNKS: (None, functools.partial(scoring.cached, at_once=named.CHUNK)),
    named.PADDED: (None, scoring.padded),
    named.ROLLOUT_FP32: ("float32", scoring.cached), named.TRAINER_FP32: ("float32", scoring.one_pass),
    named.ROLLOUT_FP16: ("float16", scoring.cached), named.TRAINER_FP16: ("float16", scoring.one_pass),
    named.TRAINER_FP64: ("float64", scoring.one_pass), named.FP8: (None, _fp8), named.INT8: (None, _rounded(8)),
    named.INT4: (None, _rounded(4)), named.INVARIANT_ROLLOUT: (None, row_invariant()(scoring.cached)),
    named.INVARIANT_TRAINER: (None, row_invariant()(scoring.one_pass)),
}


def measure(settings: TrainerAndRolloutSettings, _made_of: Inputs, writer: Writer) -> None:
    """Score the texts of the rollout's own run in every way."""
    written, groups = rollouts.EXPERIMENT.run(settings).rows, rollouts.groups(settings)
    for unit, group in writer.pending(groups, "rollout, ways: batch"):
        texts = [written[written["sample"] == one.index] for one in group]
        longest = max(map(len, texts))
        ids = torch.tensor([
            # What follows a text that ended is never read.
            one.ids + (text["token"].tolist() + [0] * longest)[:longest] for one, text in zip(group, texts, strict=True)
        ])
        columns: scoring.Columns = {}
        for way, (dtype, score) in SCORES.items():
            loaded = samples.load(settings, settings.model, dtype or settings.dtype)
            with torch.inference_mode():
                columns |= {way: score(loaded.model, way, ids.to(loaded.model.device), settings.prompt_tokens)[way]}
        scored = rollouts.rows_of(group, ids[:, settings.prompt_tokens :], columns, choosing.ends_of(loaded.model))
        sides = pd.concat(texts)[[named.ROLLOUT, named.TRAINER]].to_dict("records")
        writer.append(unit, [row | both for row, both in zip(scored, sides, strict=True)])


def work(settings: TrainerAndRolloutSettings) -> Work:
    """Count the passes of each model."""
    # Seven ways are passes, four are steps in a batch, which takes about half as long as its texts do, and one alone.
    steps = settings.n_samples * settings.new_tokens * 3
    return Work(settings.prompt_tokens + settings.new_tokens, 8 * settings.n_samples, steps, (settings.dtype,))


EXPERIMENT = Experiment("rollout_ways", TrainerAndRolloutSettings, rollouts.inputs, measure, rollouts.FIELDS, work=work)
