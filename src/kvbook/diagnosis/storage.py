"""Storage in fewer bits, told from a defect by what it does to the logits.

Rounding a number to a grid moves it by up to half a step: in the mean square by a twelfth of a step squared.  Moving
one number in twelve by a whole step does the same, and also works on numbers that are on the grid already.  So the same
is run twice, with and without such moves; a fault of the cache is in both runs or in neither, and what is left is what
storage alone does.
"""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from transformers import Cache, PreTrainedModel

from kvbook.diagnosis import feeding, probe, verdict
from kvbook.measuring import UNIT_ROUNDOFF, full_and_split, in_fp64
from kvbook.models import corpus
from kvbook.settings import CacheFormat

# Bits of a significand, the leading one included; fp8 is e4m3.
_SIGNIFICANDS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "fp8": 4}
DECLARABLE = get_args(CacheFormat)
# What a drift may look like.
FORMATS = ("float32", "float16", "bfloat16", "int8", "fp8", "int4")
# A cache holds these because it is meant to; beside them floats are scales.
_NARROW = {torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
# How many times as far as our rounding a declared format may move logits and hidden states: other scales, and tokens
# that were written from rounded ones.  `tests/test_storage.py` holds it against stand-ins, and against faults that 8
# bits do not explain.
MOST = 3.0
# How near a drift must be, at every layer, to look like a format's: closer, since nobody has declared it.
_LIKE = 2.5


def said(name: str) -> str:
    """Name a format for a reader."""
    return f"{re.search(r'[0-9]+', name)[0]} bits ({name})"


def narrower(dtype: str, declared: str | None = None) -> list[str]:
    """List the formats that hold fewer bits than a dtype, or the declared one alone if it does."""
    names = (declared,) if declared else FORMATS
    return [name for name in names if _SIGNIFICANDS.get(name, 0) < _SIGNIFICANDS[dtype]]


def declared_by(state: Any) -> str | None:
    """Name the format that a cache of transformers' quantized kinds is meant to keep; None for any other state."""
    layers = getattr(state, "layers", None) or [None]
    if not all(hasattr(layer, "_quantized_keys") for layer in layers):
        return None
    n_bits = getattr(layers[0], "nbits", None)
    return "fp8" if n_bits is None else f"int{n_bits}"


def moved(state: Any, name: str, seed: int = 0) -> Any:
    """Copy a state, and move one in twelve of its stored numbers by a step of a format, up or down."""
    copied = copy.deepcopy(state)
    found = list(_tensors(copied, set()))
    generator = torch.Generator().manual_seed(seed)
    for tensor in [each for each in found if each.dtype in _NARROW] or found:
        chance = torch.rand(tensor.shape, generator=generator)
        steps = (chance < 1 / 24).double() - (chance > 23 / 24).double()
        numbers = tensor.detach().cpu().double()
        limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        step = _step(numbers, name) if tensor.is_floating_point() else 1.0
        tensor.copy_((numbers + steps * step).clamp(limits.min, limits.max).to(tensor.dtype))
    return copied


def _step(numbers: torch.Tensor, name: str) -> torch.Tensor:
    """Return the distance to a format's next number; integers share a scale along the last dimension."""
    if integer := re.fullmatch(r"int(\d)", name):
        return numbers.abs().amax(-1, keepdim=True) / max(1, 2 ** (int(integer[1]) - 1) - 1)
    step = torch.ldexp(torch.ones_like(numbers), torch.frexp(numbers).exponent - _SIGNIFICANDS[name])
    return step.where(numbers != 0, 0.0)


def _tensors(state: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Find what a state holds: numbers of floating point or of 8 bits, more than one of them."""
    if id(state) in seen or isinstance(state, torch.nn.Module):
        return
    seen.add(id(state))
    if isinstance(state, np.ndarray) and state.dtype.kind in "fiu":
        state = torch.from_numpy(state)
    if isinstance(state, torch.Tensor):
        # A single number is a scale or a counter.
        if state.numel() > 1 and (state.is_floating_point() or state.dtype in _NARROW):
            yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _tensors(part, seen)
    elif hasattr(state, "__dict__"):
        yield from _tensors(vars(state), seen)


# Of a model.


def rows_of(
    model: PreTrainedModel, dtype: str, texts: list[corpus.Sample], names: list[str], seed: int = 0, **options: Any
) -> Iterator[dict[str, Any]]:
    """Measure how far each format moves logits and hidden states, in one call on an empty cache."""
    with torch.inference_mode(), in_fp64.widened(model.dtype):
        for text in texts:
            ids = torch.tensor([text.ids], device=model.device)
            stock, stock_logits = _read_through(model, ids, None, seed, **options)
            for name in names:
                other, logits = _read_through(model, ids, name, seed + text.index, **options)
                yield {
                    "dtype": dtype, "format": name,
                    "drift": probe.relative(stock.logits, other.logits, centred=True).item(),
                    "layers": probe.relative(stock.hidden, other.hidden).tolist(),
                    "furthest": feeding.largest_drift(stock_logits, logits),
                }


def _read_through(
    model: PreTrainedModel, ids: torch.Tensor, name: str | None, seed: int, **options: Any
) -> tuple[full_and_split.LastToken, torch.Tensor]:
    """Run a text with a cache that keeps nothing: it gives back what enters it, some of the numbers moved.

    What the model's own cache rounds is thus left out of both runs.  Not safe in threads, as a class's method is
    replaced.
    """
    seeds = itertools.count(1000 * seed)

    def update(_cache: Cache, *states: Any, **_more: Any) -> tuple[torch.Tensor, ...]:
        return tuple(moved(each, name, next(seeds)) if name else each for each in states[:2])

    with patch.object(Cache, "update", update):
        output = model(ids, output_hidden_states=True, **options)
    return probe.last_tokens(output)[0], output.logits


class Storage(NamedTuple):
    """What a format does to the logits, beside a drift.

    Attributes
    ----------
    name : str
        The format.
    drift : float
        Of the logits, that rounding each stored number to it gives; mean over texts.
    least, most : float
        How many times as far the cached pass is from the full pass, where that is least and where it is most: at the
        logits and at every layer, on every path.
    beyond : sequence of str
        Coarser dtypes whose drift neither the format nor rounding explains, as where fp16 overflows.
    """

    name: str
    drift: float
    least: float
    most: float
    beyond: Sequence[str] = ()

    @property
    def explains(self) -> bool:
        """Tell whether a declared format may be the only cause of the drift."""
        return self.most <= MOST and not self.beyond

    @property
    def looks_like(self) -> str:
        """Say what an undeclared drift is like; no more than that, for other faults may drift alike."""
        drift = f"rounding each stored number to that drifts by {self.drift:.1e}"
        return f"looks like storage in {said(self.name)}: {drift}"

    @property
    def excess(self) -> str:
        """Say that a declared format does not explain a drift."""
        times = f": up to {self.most:,.0f} times what rounding to that does"
        more = times if self.most > MOST else f" in {', '.join(self.beyond)}"
        return f"storage in {said(self.name)} does not explain it{more}"

    def why(self, finding: verdict.Finding) -> str:
        """Say that a declared format explains a drift."""
        dtype, drift = next(iter(finding.drift.items()))
        times = f"{drift / self.drift:.1f} times that of rounding each stored number to {said(self.name)}"
        return f"drift {drift:.1e} in {dtype}, {times}"


def compared(name: str, found: list[np.ndarray], of_format: np.ndarray, beyond: Sequence[str] = ()) -> Storage:
    """Compare the drifts of several paths with a format's, the logits' last; where both are zero they say nothing."""
    of_each = np.broadcast_to(of_format, (len(found), len(of_format)))
    somewhere = (np.stack(found) > 0) | (of_each > 0)
    with np.errstate(divide="ignore"):
        times = np.stack(found)[somewhere] / of_each[somewhere]
    least, most = float(times.min(initial=np.inf)), float(times.max(initial=0.0))
    return Storage(name, float(of_format[-1]), least, most, beyond)


def storages(rows: pd.DataFrame, moves: pd.DataFrame) -> list[Storage]:
    """Compare the drift of a check with that of every format, in the finest dtype in which both were measured."""
    dtype = next(name for name in UNIT_ROUNDOFF if name in set(moves["dtype"]))
    found = [_places(part) for _, part in rows[rows["dtype"] == dtype].groupby("way", sort=False)]
    furthest = rows.groupby(["dtype", "way"])["drift"].mean().groupby("dtype").max()
    compare = []
    for name, part in moves.groupby("format", sort=False):
        limits = bounds(part.groupby("dtype")["drift"].mean())
        beyond = [other for other, drift in furthest.items() if other != dtype and drift > limits[other]]
        compare.append(compared(name, found, _places(part[part["dtype"] == dtype]), beyond))
    return compare


def bounds(drift: Mapping[str, float]) -> dict[str, float]:
    """Return the drift by dtype that a format explains; in coarser dtypes rounding may explain it too."""
    finest = next(dtype for dtype in UNIT_ROUNDOFF if dtype in drift)
    return {
        dtype: max(MOST * drift.get(dtype, 0.0), 0.0 if dtype == finest else verdict.LIMIT * roundoff)
        for dtype, roundoff in UNIT_ROUNDOFF.items()
    }


def _places(part: pd.DataFrame) -> np.ndarray:
    """Return the mean drift after every layer, and of the logits."""
    return np.append(np.array(part["layers"].tolist()).mean(0), part["drift"].mean())


def nearest(found: list[Storage]) -> Storage | None:
    """Choose the format that a drift is most like; None where it is like none."""
    # About the format's drift everywhere.
    alike = [each for each in found if each.least >= 1 / _LIKE and each.most <= _LIKE and not each.beyond]
    return min(alike, key=lambda each: max(each.most, 1 / each.least)) if alike else None
