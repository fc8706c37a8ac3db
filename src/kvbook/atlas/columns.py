"""One row of the atlas: what one architecture's cache does, at three roundoffs.

This needs little of transformers and runs on many releases; `kvbook.atlas.invariance` adds what row-invariant
arithmetic makes of it.
"""

import textwrap
import time
from typing import Any

import torch

from kvbook import older
from kvbook.atlas import LENGTH, SHORT, STATIC, WHOLE, configurations
from kvbook.diagnosis import execution_paths, feeding, verdict
from kvbook.measuring import UNIT_ROUNDOFF, agreement, in_fp64

DTYPES = ("float64", "float32", "bfloat16")
_TEXTS = 2


def look_at(model: torch.nn.Module) -> feeding.Fed:
    """Find out what a model's cache is called and what it is."""
    return feeding.look_at(model, configurations.text(4).to(model.device))


def is_causal(fed: feeding.Fed, ids: torch.Tensor) -> bool:
    """Tell whether a full pass leaves earlier logits as they are, but for rounding, whatever follows and however much.

    Where it does not, no cache can agree with it, and none is at fault: ProphetNet's streams change with a text's
    length.
    """
    other = ids.clone()
    other[:, -1] = 17 + (other[:, -1] + 40) % 200
    given = fed.full(ids).double()
    fewer = ids.shape[1] // 2
    pairs = [(fed.full(other).double()[:, :-1], given[:, :-1]), (fed.full(ids[:, :fewer]).double(), given[:, :fewer])]
    return all(bool((one - another).abs().max() < 1e-4 * given.std()) for one, another in pairs)


def ready(name: str, dtype: str, device: str) -> feeding.Fed:
    """Build a model and try it; experts one after the other where their grouped product lacks the dtype."""
    model = configurations.build(name, getattr(torch, dtype), device=device)
    try:
        return look_at(model)
    except (RuntimeError, NotImplementedError) as error:
        # The product's own words where it lacks a dtype.
        if "mat_a" not in str(error):
            raise
        model.set_experts_implementation("eager")
        return look_at(model)


def in_one_line(error: BaseException) -> str:
    """Put an error into one line, with its class: the reason often stands on the second."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")


def measure(name: str, device: str = "cpu", quick: bool = False) -> dict[str, Any]:
    """Measure one architecture: drifts, errors and reasons of each path by dtype, which `table.judged` judges.

    The quick form has one short text and begins in fp32; fp64 sees the paths that fp32 does not call sound.
    """
    start = time.monotonic()
    torch.manual_seed(0)
    with torch.inference_mode():
        fed = ready(name, "float32", device)
        ids = configurations.text(LENGTH).to(device)
        row: dict[str, Any] = {"status": "ran", "cache": fed.kind, "parameters": fed.model.num_parameters()}
        row["causal"] = is_causal(fed, ids)
        # A class that says that it cannot be compiled whole promises nothing about a static cache.
        row[f"{STATIC}, declared"] = older.promises_static(fed.model)
        row |= _quickly(name, device, fed) if quick else _as_it_is(name, device)
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def _as_it_is(name: str, device: str) -> dict[str, Any]:
    """Try every path in every dtype: what each drifts by, what it raises, or why there was nothing to try."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        _tried(found, name, dtype, device, execution_paths.of(execution_paths.ATLAS))
    return found


def _quickly(name: str, device: str, fed: feeding.Fed) -> dict[str, Any]:
    found: dict[str, Any] = {}
    paths = execution_paths.of(execution_paths.ATLAS)
    _tried(found, name, "float32", device, paths, 1, SHORT, fed)
    # A prompt that is fed twice is known by the tokens that were fed.
    known = {WHOLE} if found.get(f"{WHOLE}, tokens fed", 0) > 1 else set()
    drifts = {path: found[f"{path}, drift"] for path in paths.keys() - known if f"{path}, drift" in found}
    if left := [path for path, drift in drifts.items() if verdict.kind_of(drift) not in ("exact", "rounding")]:
        _tried(found, name, "float64", device, {path: paths[path] for path in left}, 1, SHORT)
    return found


def _tried(
    found: dict[str, Any], name: str, dtype: str, device: str, paths: dict[str, execution_paths.Path],
    texts: int = _TEXTS, length: int = LENGTH, fed: feeding.Fed | None = None,
) -> None:
    """Try paths in one dtype, and put what they give into a row."""
    try:
        fed = fed or ready(name, dtype, device)
        given = [configurations.text(length, seed=5 + k).to(fed.model.device) for k in range(texts)]
        with in_fp64.widened(getattr(torch, dtype)):
            whole = [fed.full(ids) for ids in given]
    except Exception as error:
        found.setdefault("dtypes left out", {})[dtype] = in_one_line(error)
        return
    with in_fp64.widened(getattr(torch, dtype)):
        for path, one in paths.items():
            try:
                offs = [_off(one, fed, ids, full) for ids, full in zip(given, whole, strict=True)]
            except execution_paths.NoCache as reason:
                found.setdefault(f"{path}, not tried", {})[dtype] = str(reason)
                continue
            except Exception as error:
                found.setdefault(f"{path}, error", {})[dtype] = in_one_line(error)
                continue
            drifts = found.setdefault(f"{path}, drift", {})
            drifts[dtype] = [off.max().item() for off in offs]
            # Of the finest dtype that there is.
            if dtype == min(drifts, key=UNIT_ROUNDOFF.get):
                wrong = (torch.stack(offs) > verdict.LIMIT * UNIT_ROUNDOFF[dtype]).any(0)
                found |= {f"{path}, first wrong position": int(wrong.nonzero()[0])} if wrong.any() else {}
    if fed.refed is not None:
        found[f"{WHOLE}, tokens fed"] = fed.refed


def _off(path: execution_paths.Path, fed: feeding.Fed, ids: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return by how much each position's logits are off, over the spread of the full pass."""
    expected, found = path.compared(fed, ids, whole)
    return agreement.over_spread(expected, found, whole.cpu().double().std())[0]
