"""One row of the atlas: what one architecture's cache does, at three roundoffs and under row-invariant arithmetic."""

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch

from kvbook.atlas import configurations, feeding
from kvbook.diagnosis import verdict
from kvbook.exact import NotInvariant, row_invariant
from kvbook.measuring.agreement import UNIT_ROUNDOFF
from kvbook.measuring.first_operation import first_operation
from kvbook.measuring.in_fp64 import widened

DTYPES = ("float64", "float32", "bfloat16")
# In which row-invariant arithmetic is tried, and the first operation that needs it is looked for.
SWITCHED = ("float32", "bfloat16")
_TEXTS = 2
_PROMPT = 10
# Tokens of the shorter passes, beside a single one: within the window, and all but the last, as a prefill has them.
_FEWER = (7, feeding.LENGTH - 1)
# Paths on which row-invariant arithmetic has something to keep equal.
_SOUND = ("exact", "rounding", "undecided")
# A row of logits beyond so many roundoffs of fp32 is a wrong one.
_WRONG = verdict.LIMIT


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
    """Measure one architecture."""
    start = time.monotonic()
    row: dict[str, Any] = {"architecture": name, "class": configurations.class_of(name)}
    torch.manual_seed(0)
    with torch.inference_mode():
        fed = _ready(name, "float32", device)
        ids = configurations.text(feeding.LENGTH).to(device)
        row |= {"status": "ran", "cache": fed.kind, "parameters": fed.model.num_parameters()}
        row["causal"] = feeding.is_causal(fed, ids)
        # A class that says that it cannot be compiled whole promises nothing about a static cache.
        row |= _as_it_is(name, device, row["causal"], static=fed.model._can_compile_fullgraph)
        with contextlib.suppress(feeding.NoCache):
            row["cache as long as the prompt"] = feeding.cache_as_long_as_the_prompt(fed, ids[:, :_PROMPT])
        if row["causal"]:
            row |= _first_operations(name, device, ids)
        if row["causal"] and fed.name:
            row |= _under_row_invariance(name, device, ids, [path for path in feeding.PATHS if row[path] in _SOUND])
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def _drifts(fed: feeding.Fed, dtype: str) -> Iterator[dict[str, Any]]:
    """Compare every path with the full pass."""
    for sample in range(_TEXTS):
        ids = configurations.text(feeding.LENGTH, seed=5 + sample).to(fed.model.device)
        with widened(getattr(torch, dtype)):
            expected = feeding.full(fed, ids).double()
            for path, feed in feeding.PATHS.items():
                about = {"dtype": dtype, "source": str(sample), "sample": sample, "path": path}
                try:
                    found = feed(fed, ids).double()
                except Exception as error:
                    yield about | {"drift": None, "error": in_one_line(error)}
                    continue
                off = (found - expected).square().mean(-1).sqrt()[0] / expected.std()
                yield about | {"drift": off.max().item(), "off": off.tolist(), "error": None}


def _as_it_is(name: str, device: str, causal: bool, static: bool) -> dict[str, Any]:
    rows = []
    for dtype in DTYPES:
        try:
            rows += _drifts(_ready(name, dtype, device), dtype)
        except Exception as error:
            rows.append({"dtype": dtype, "path": None, "error": in_one_line(error)})
    table = pd.DataFrame(rows)
    found: dict[str, Any] = {}
    for path in feeding.PATHS:
        part = table[table["path"] == path]
        failed = part[part["error"].notna()]
        if len(failed):
            found[path] = failed["error"].iloc[0].replace("NoCache: ", "not applicable: ")
            continue
        finding = verdict.judge(part[["dtype", "source", "sample", "drift"]].astype({"drift": float}))
        found[path] = finding.kind if causal else "not causal"
        if path == "left padding" and found[path] == "bug":
            # Not the cache's doing: the full pass itself gives other logits behind padding.
            found[path] = "padding counts"
        if path == "static cache" and found[path] == "bug" and not static:
            found[path] = "wrong, and not declared"
        found[f"{path}, drift"] = finding.drift
        if finding.kind == "bug":
            found[f"{path}, first wrong position"] = _first_wrong(part)
    if left_out := {row["dtype"]: row["error"] for row in rows if row["path"] is None}:
        found["dtypes left out"] = left_out
    return found


def _first_wrong(part: pd.DataFrame) -> int | None:
    """Give the first position whose logits are off by more than rounding, in the finest dtype."""
    finest = part[part["dtype"] == part["dtype"].iloc[0]]
    roundoff = UNIT_ROUNDOFF[finest["dtype"].iloc[0]]
    wrong = [next((i for i, off in enumerate(offs) if off > _WRONG * roundoff), None) for offs in finest["off"]]
    return min((position for position in wrong if position is not None), default=None)


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
