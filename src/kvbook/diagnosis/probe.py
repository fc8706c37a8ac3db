"""A model's cached pass against its full pass: how far apart they are, at the end and after every layer.

The model is called as it stands: whether a cache comes back is its configuration's doing.  The rows of a check are such
readings of every text on every execution path, in one dtype.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbook import UserError, older
from kvbook.diagnosis import execution_paths, feeding, verdict
from kvbook.measuring import UNIT_ROUNDOFF, agreement, full_and_split, in_fp64
from kvbook.models import corpus

CUTS = {path.name: path.cut for path in execution_paths.PATHS if path.cut}
SPLIT = "prefix + last token"
# What `kvbook check` tries.
WAYS = tuple(execution_paths.of(execution_paths.CHECK))
# The fewest tokens that every one of these can cut.
SHORTEST = 4
# Texts that a check feeds together.
TOGETHER = 4


class Reading(NamedTuple):
    """One way on one text.

    Attributes
    ----------
    way : str
        How the text was fed.
    drift : float
        Root mean square difference of the last token's logits over the spread (standard deviation) of the full pass's,
        which is the scale that a softmax sees.  NaN where the full pass is not finite, infinite where only it is.
    layers : list of float
        The same of the hidden states after the embedding and every layer, over their root mean square.
    held : int
        Tokens in the cache before the last part was fed; 0 where no cache came back.
    fed : int
        Tokens that had been fed by then.
    """

    way: str
    drift: float
    layers: list[float]
    held: int
    fed: int


LastTokens = list[full_and_split.LastToken]


def last_tokens(output) -> LastTokens:
    """Take each text's last token, its hidden states and logits, from what a model returned."""
    shape = output.logits.shape[:2]
    states = [_one_width(state, shape)[:, -1] for state in output.hidden_states]
    # These leave the embedding out, and give the last layer twice, the second time after the norm.
    if type(output).__name__.startswith(("Mamba", "FalconMamba", "Rwkv")):
        states = [torch.zeros_like(states[0]), *states[:-2], states[-1]]
    # Zeros up to the widest change no share of a difference in what it is a difference of.
    hidden = [pad_sequence([state[row] for state in states], batch_first=True) for row in range(shape[0])]
    return [full_and_split.LastToken(*pair) for pair in zip(hidden, output.logits[:, -1], strict=True)]


def _one_width(state: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Put several residual streams side by side; classes put them before or after the texts."""
    if state.dim() == 4 and state.shape[:2] != shape:
        state = state.movedim(0, 2)
    return state.flatten(2)


def cached_rows(model: PreTrainedModel, ids: torch.Tensor, parts: list[int], **options) -> tuple[LastTokens, int]:
    """Feed texts in parts, each on top of whatever cache the call before returned."""
    past, fed, name = None, 0, feeding.cache_name(model)
    counts = name == "cache_params" and feeding.takes(model, "cache_position")
    for part in ids.split(parts, 1):
        # Before the call, which adds to the same cache.
        held = 0 if past is None else older.held(past, fed)
        # Before transformers 5.4 some recurrent classes are told where a part begins.
        where = {"cache_position": torch.arange(fed, fed + part.shape[1], device=ids.device)} if counts else {}
        output = model(part, **{name: past}, **where, output_hidden_states=True, **options)
        past, fed = getattr(output, name), fed + part.shape[1]
    return last_tokens(output), held


def full_rows(model: PreTrainedModel, ids: torch.Tensor) -> LastTokens:
    """Run texts at once and without a cache, in the arithmetic of `widened`."""
    with torch.inference_mode(), in_fp64.widened(model.dtype):
        return last_tokens(model(ids, use_cache=False, output_hidden_states=True))


def readings(
    model: PreTrainedModel, ids: torch.Tensor, fed: torch.Tensor, generator: np.random.Generator,
    ways: tuple[str, ...] = WAYS, full: LastTokens | None = None, **options,
) -> Iterator[list[Reading]]:
    """Compare every way of feeding texts of one length, all together, with the full pass: a reading of each text."""
    full = full or full_rows(model, ids)
    with torch.inference_mode(), in_fp64.widened(model.dtype):
        for way in ways:
            parts = CUTS[way](fed.shape[1], generator)
            found, held = cached_rows(model, fed, parts, **options)
            yield compared(way, full, found, held, fed.shape[1] - parts[-1])


def compared(way: str, full: LastTokens, found: LastTokens, held: int, fed: int) -> list[Reading]:
    """Compare each text's last token with that of the full pass."""
    return [
        Reading(way, _drift(expected.logits, got.logits), relative(expected.hidden, got.hidden).tolist(), held, fed)
        for expected, got in zip(full, found, strict=True)
    ]


def _drift(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Measure a drift of logits; logits that are all equal, as of a head of zeros, leave nothing to compare."""
    if (expected == expected[0]).all():
        return math.nan
    return relative(expected, found, centred=True).item()


def relative(reference: torch.Tensor, other: torch.Tensor, centred: bool = False) -> torch.Tensor:
    """Measure a difference without a scale, over the last dimension."""
    reference = reference.cpu().double()
    scale = reference.std(-1, correction=0) if centred else reference.square().mean(-1).sqrt()
    return agreement.over_spread(reference, other, scale)


def samples_of(tokenizer: PreTrainedTokenizerBase, texts: str, n_samples: int, n_tokens: int) -> list[corpus.Sample]:
    """Cut the texts of a check."""
    found = list(corpus.samples(texts, tokenizer, n_samples, n_tokens, named="--tokens"))
    if short := [sample for sample in found if len(sample.ids) < SHORTEST]:
        has = f"{short[0].source} has {len(short[0].ids)} tokens"
        raise UserError(f"{has}, fewer than {SHORTEST}: name a folder of longer texts")
    return found


def in_batches(texts: list[corpus.Sample], most: int) -> list[list[corpus.Sample]]:
    """Put texts of one length together, which then need no padding: a step reads the weights once for all of them."""
    by_length: dict[int, list[corpus.Sample]] = {}
    for text in texts:
        by_length.setdefault(len(text.ids), []).append(text)
    return [some[first : first + most] for some in by_length.values() for first in range(0, len(some), most)]


def rows_of(
    model: PreTrainedModel, dtype: str, texts: list[corpus.Sample], seed: int = 0, ways: tuple[str, ...] = WAYS,
    together: int = 1, **options: Any,
) -> Iterator[dict[str, Any]]:
    """Measure one dtype."""
    for batch in in_batches(texts, together):
        ids = torch.tensor([text.ids for text in batch], device=model.device)
        for each in readings(model, ids, ids, np.random.default_rng([seed, batch[0].index]), ways, **options):
            yield from as_rows(dtype, batch, each)


def as_rows(dtype: str, batch: list[corpus.Sample], readings: list[Reading]) -> list[dict[str, Any]]:
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
