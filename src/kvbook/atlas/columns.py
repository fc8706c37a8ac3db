"""One row of the atlas: what one architecture's cache does, at three roundoffs and under row-invariant arithmetic."""

import contextlib
import textwrap
import time
from collections.abc import Callable
from typing import Any

import torch

from kvbook.atlas import configurations, feeding, table
from kvbook.atlas.names import SWITCHED
from kvbook.diagnosis import verdict
from kvbook.exact import NotInvariant, row_invariant
from kvbook.measuring.first_operation import first_operation
from kvbook.measuring.in_fp64 import widened
from kvbook.measuring.roundoff import UNIT_ROUNDOFF

DTYPES = ("float64", "float32", "bfloat16")
# What `generate` feeds is not ours to keep equal.
SWITCHED_PATHS = tuple(path for path in feeding.PATHS if path != feeding.WHOLE)
_TEXTS = 2
_PROMPT = 10
# Tokens of the shorter passes, beside a single one: within the window, and all but the last, as a prefill has them.
_FEWER = (7, feeding.LENGTH - 1)
# Paths on which row-invariant arithmetic has something to keep equal.
_SOUND = ("exact", "rounding", "undecided")


def _ready(name: str, dtype: str, device: str) -> feeding.Fed:
    """Build a model and try it; experts one after the other where their grouped product lacks the dtype."""
    wanted = getattr(torch, dtype)
    try:
        return feeding.look_at(configurations.build(name, wanted, device=device))
    except (RuntimeError, NotImplementedError) as error:
        # The product's own words where it lacks a dtype.
        if "mat_a" not in str(error):
            raise
        return feeding.look_at(configurations.build(name, wanted, experts="eager", device=device))


def in_one_line(error: BaseException) -> str:
    """Give an error in one line, with its class: the reason often stands on the second."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")


def measure(name: str, device: str = "cpu") -> dict[str, Any]:
    """Measure one architecture: drifts, errors and reasons of each path by dtype, which `table.judged` judges."""
    start = time.monotonic()
    row: dict[str, Any] = {"architecture": name, "class": configurations.class_of(name)}
    torch.manual_seed(0)
    with torch.inference_mode():
        fed = _ready(name, "float32", device)
        ids = configurations.text(feeding.LENGTH).to(device)
        row |= {"status": "ran", "cache": fed.kind, "parameters": fed.model.num_parameters()}
        row["causal"] = feeding.is_causal(fed, ids)
        # A class that says that it cannot be compiled whole promises nothing about a static cache.
        row[f"{feeding.STATIC}, declared"] = bool(fed.model._can_compile_fullgraph)
        row |= _as_it_is(name, device)
        if row["causal"]:
            row |= _first_operations(name, device, ids)
        if row["causal"] and fed.name:
            judged = table.judged(row)
            row |= _under_row_invariance(name, device, ids, [path for path in SWITCHED_PATHS if judged[path] in _SOUND])
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def _as_it_is(name: str, device: str) -> dict[str, Any]:
    """Try every path in every dtype: what each drifts by, what it raises, or why there was nothing to try."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        try:
            fed = _ready(name, dtype, device)
            with widened(getattr(torch, dtype)):
                texts = [configurations.text(feeding.LENGTH, seed=5 + k).to(fed.model.device) for k in range(_TEXTS)]
                expected = [feeding.full(fed, ids).double() for ids in texts]
        except Exception as error:
            found.setdefault("dtypes left out", {})[dtype] = in_one_line(error)
            continue
        with widened(getattr(torch, dtype)):
            for path, feed in feeding.PATHS.items():
                try:
                    offs = [_off(feed(fed, ids).double(), whole) for ids, whole in zip(texts, expected, strict=True)]
                except feeding.NoCache as reason:
                    found.setdefault(f"{path}, not tried", {})[dtype] = str(reason)
                    continue
                except Exception as error:
                    found.setdefault(f"{path}, error", {})[dtype] = in_one_line(error)
                    continue
                drifts = found.setdefault(f"{path}, drift", {})
                drifts[dtype] = [off.max().item() for off in offs]
                # Of the finest dtype that there is.
                if len(drifts) == 1 and (first := [at for off in offs if (at := _first_wrong(off, dtype)) is not None]):
                    found[f"{path}, first wrong position"] = min(first)
            # Where the path has an error, so has this.
            with contextlib.suppress(Exception):
                found[f"{feeding.WHOLE}, tokens fed"] = feeding.onto_its_own_prompt(fed, texts[0][:, :-1])[1]
    return found


def _off(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Give by how much each position's logits are off, over their spread; a path may stop before the last."""
    off = (found - expected[:, : found.shape[1]]).square().mean(-1).sqrt()[0] / expected.std()
    # No number where the full pass has one is as wrong as can be.
    return off.nan_to_num(nan=torch.inf, posinf=torch.inf) if expected.isfinite().all() else off


def _first_wrong(off: torch.Tensor, dtype: str) -> int | None:
    """Give the first position that is off by more than rounding."""
    wrong = (off > verdict.LIMIT * UNIT_ROUNDOFF[dtype]).nonzero()
    return int(wrong[0]) if len(wrong) else None


def _first_operations(name: str, device: str, ids: torch.Tensor) -> dict[str, Any]:
    """Name the first operation whose result for a token depends on how many come with it, and its kind."""
    row: dict[str, Any] = {}
    for dtype in SWITCHED:
        try:
            model = _ready(name, dtype, device).model
            try:
                first = first_operation(model, ids, (1, *_FEWER))
            except Exception:
                # MPT makes no mask for a single token, and fails.
                first = first_operation(model, ids, (2, *_FEWER))
        except Exception as error:
            row |= {f"first operation, {dtype}": in_one_line(error), f"first kind, {dtype}": "fails"}
            continue
        if first is None:
            said, kind = "none", "none"
        else:
            place = "" if first.layer is None else f"layer {first.layer}, "
            said = f"{place}{first.operation} ({first.function}, {first.rows} of {ids.shape[1]} tokens)"
            kind = first.kind if first.on_equal_inputs else "not comparable row by row"
        row |= {f"first operation, {dtype}": said, f"first kind, {dtype}": kind}
    return row


def _under_row_invariance(name: str, device: str, ids: torch.Tensor, paths: list[str]) -> dict[str, Any]:
    """Try the paths that are sound without it: no arithmetic makes a wrong cache right."""
    found: dict[str, Any] = {}
    for dtype in SWITCHED:
        try:
            fed = _ready(name, dtype, device)
        except Exception as error:
            # Some class does not run in every dtype, row-invariant or not.
            found[f"row-invariant {dtype} left out"] = in_one_line(error)
            continue
        with row_invariant():
            expected = _tried(lambda fed=fed, ids=ids: feeding.full(fed, ids))
            for path in paths:
                given = _tried(lambda fed=fed, ids=ids, path=path: feeding.PATHS[path](fed, ids))
                refused = next((each for each in (expected, given) if isinstance(each, str)), None)
                found[f"{path}, row-invariant {dtype}"] = refused or (
                    "exact" if torch.equal(expected, given) else "different"
                )
    outcomes = {outcome for key, outcome in found.items() if not key.endswith("left out")}
    refused = sorted(outcomes - {"exact", "different"})
    found["row_invariant"] = "different" if "different" in outcomes else refused[0] if refused else "exact"
    return found


def _tried(feed: Callable[[], torch.Tensor]) -> torch.Tensor | str:
    """Give the logits, or why there are none."""
    try:
        return feed()
    except NotInvariant as error:
        return f"refused: {_operation(error)}"
    except Exception as error:
        return f"fails: {in_one_line(error)}"


def _operation(error: NotInvariant) -> str:
    said = str(error).removeprefix("row_invariant() ").split(":  ")[0].split(", which")[0]
    return textwrap.shorten(said, 200, placeholder=" …")
