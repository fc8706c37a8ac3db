"""An architecture under row-invariant arithmetic: which paths become exact, and which operation made them differ."""

import textwrap
import time
from collections.abc import Callable
from typing import Any

import torch

from kvbook.atlas import LENGTH, PATHS, SWITCHED, WHOLE, columns, configurations, table
from kvbook.diagnosis import execution_paths
from kvbook.exact import NotInvariant, row_invariant
from kvbook.measuring.replay import first_operation

# On these row-invariant arithmetic has not been tried on every architecture yet.
_NOT_YET = (
    "copied cache, used twice", "verify and roll back", "right padding", "padding on a continued pass",
    "padding, batch of 1", "unequal lengths", "beam reordering", "positions given", "use_cache=True",
)
# What `generate` feeds is not ours to keep equal.
SWITCHED_PATHS = tuple(path for path in PATHS if path not in (WHOLE, *_NOT_YET))
# Tokens of the shorter passes, beside a single one: within the window, and all but the last, as a prefill has them.
_FEWER = (7, LENGTH - 1)
# Paths on which row-invariant arithmetic has something to keep equal.
_SOUND = ("exact", "rounding", "undecided")


def measure(name: str, device: str = "cpu") -> dict[str, Any]:
    """Measure one architecture on its paths, then under row-invariant arithmetic."""
    start = time.monotonic()
    row = columns.measure(name, device)
    with torch.inference_mode():
        ids = configurations.text(LENGTH).to(device)
        if row["causal"]:
            row |= first_operations(name, device, ids)
        if row["causal"] and row["cache"] != "none" and not row["cache"].startswith("raises"):
            judged = table.judged(row)
            row |= tried(name, device, ids, [path for path in SWITCHED_PATHS if judged[path] in _SOUND])
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def first_operations(name: str, device: str, ids: torch.Tensor) -> dict[str, Any]:
    """Name the first operation whose result for a token depends on how many come with it, and its kind."""
    row: dict[str, Any] = {}
    for dtype in SWITCHED:
        said = kind = "none"
        try:
            model = columns.ready(name, dtype, device).model
            try:
                first = first_operation(model, ids, (1, *_FEWER))
            except Exception:
                # MPT makes no mask for a single token, and fails.
                first = first_operation(model, ids, (2, *_FEWER))
        except Exception as error:
            first, said, kind = None, columns.in_one_line(error), "fails"
        if first is not None:
            place = "" if first.call.layer is None else f"layer {first.call.layer}, "
            said = f"{place}{first.call.operation} ({first.function}, {first.rows} of {ids.shape[1]} tokens)"
            kind = first.call.kind if first.on_equal_inputs else "not comparable row by row"
        row |= {f"first operation, {dtype}": said, f"first kind, {dtype}": kind}
    return row


def tried(name: str, device: str, ids: torch.Tensor, paths: list[str]) -> dict[str, Any]:
    """Try the paths that are sound without it: no arithmetic makes a wrong cache right."""
    found: dict[str, Any] = {}
    known = execution_paths.of(execution_paths.ATLAS)
    for dtype in SWITCHED:
        try:
            fed = columns.ready(name, dtype, device)
        except Exception as error:
            # Some class does not run in every dtype, row-invariant or not.
            found[f"row-invariant {dtype} left out"] = columns.in_one_line(error)
            continue
        # On a release where it was never tried, this is what tries it.
        with row_invariant(untried=True):
            whole = _tried(fed.full, ids)
            for path in paths:
                pair = whole if isinstance(whole, str) else _tried(known[path].compared, fed, ids, whole)
                said = pair if isinstance(pair, str) else "exact" if torch.equal(*pair) else "different"
                found[f"{path}, row-invariant {dtype}"] = said
    outcomes = {outcome for key, outcome in found.items() if not key.endswith("left out")}
    refused = sorted(outcomes - {"exact", "different"})
    found["row_invariant"] = "different" if "different" in outcomes else refused[0] if refused else "exact"
    return found


def _tried(feed: Callable[..., Any], *given: Any) -> Any:
    """Return what feeding gives, or why it gives nothing."""
    try:
        return feed(*given)
    except NotInvariant as error:
        said = str(error).removeprefix("row_invariant() ").split(":  ")[0].split(", which")[0]
        return f"refused: {textwrap.shorten(said, 200, placeholder=' …')}"
    except Exception as error:
        return f"fails: {columns.in_one_line(error)}"
