"""The rows of a check: every text on every execution path, in one dtype."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbook import UserError
from kvbook.diagnosis import probe, verdict
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.models import corpus

# Texts that a check feeds together.
TOGETHER = 4


def samples_of(tokenizer: PreTrainedTokenizerBase, texts: str, n_samples: int, n_tokens: int) -> list[corpus.Sample]:
    """Cut the texts of a check."""
    found = list(corpus.samples(texts, tokenizer, n_samples, n_tokens))
    if short := [sample for sample in found if len(sample.ids) < probe.SHORTEST]:
        has = f"{short[0].source} has {len(short[0].ids)} tokens"
        raise UserError(f"{has}, fewer than {probe.SHORTEST}: name a folder of longer texts")
    return found


def in_batches(texts: list[corpus.Sample], most: int) -> list[list[corpus.Sample]]:
    """Put texts of one length together, which then need no padding: a step reads the weights once for all of them."""
    by_length: dict[int, list[corpus.Sample]] = {}
    for text in texts:
        by_length.setdefault(len(text.ids), []).append(text)
    return [some[first : first + most] for some in by_length.values() for first in range(0, len(some), most)]


def rows_of(
    model: PreTrainedModel, dtype: str, texts: list[corpus.Sample], seed: int = 0, ways: tuple[str, ...] = probe.WAYS,
    together: int = 1, **options: Any,
) -> Iterator[dict[str, Any]]:
    """Measure one dtype."""
    for batch in in_batches(texts, together):
        ids = torch.tensor([text.ids for text in batch], device=model.device)
        generator = np.random.default_rng([seed, batch[0].index])
        for readings in probe.readings(model, ids, ids, generator, ways, **options):
            yield from as_rows(dtype, batch, readings)


def as_rows(dtype: str, batch: list[corpus.Sample], readings: list[probe.Reading]) -> list[dict[str, Any]]:
    """Say with each reading of which text it is."""
    return [
        {"dtype": dtype, "source": text.source, "sample": text.index, **reading._asdict()}
        for text, reading in zip(batch, readings, strict=True)
    ]


def suspicious_layer(rows: pd.DataFrame) -> int | None:
    """Find the first place in the model whose drift is no rounding, in the finest dtype that is there.

    None is the LM head: no hidden state is beyond rounding, and none drifts by so much more than the one before it as
    the logits do.
    """
    dtype = next(name for name in UNIT_ROUNDOFF if name in set(rows["dtype"]))
    roundoff = UNIT_ROUNDOFF[dtype]
    part = rows[rows["dtype"] == dtype]
    layers = np.array(part["layers"].tolist()).max(0)
    if not layers.any():
        return None
    beyond = np.flatnonzero(~(layers <= verdict.LIMIT * roundoff))
    if len(beyond):
        return int(beyond[0])
    places = np.maximum([*layers, part["drift"].max()], roundoff)
    first = int(np.argmax(np.diff(np.log(places), prepend=np.log(roundoff))))
    return first if first < len(layers) else None


def by_way(rows: pd.DataFrame, seed: int) -> dict[str, verdict.Finding]:
    """Judge every execution path."""
    return {way: verdict.judge(part, seed) for way, part in rows.groupby("way", sort=False)}


def worst(found: dict[str, verdict.Finding]) -> tuple[str, verdict.Finding]:
    """Find the path with the worst verdict; of several bugs that with the largest drift in its finest dtype."""

    def badness(item: tuple[str, verdict.Finding]) -> tuple[int, float]:
        kind, drifts = item[1].kind, list(item[1].drift.values())
        return verdict.ORDER.index(kind), drifts[0] if kind == "bug" and drifts else 0.0

    return max(found.items(), key=badness)
