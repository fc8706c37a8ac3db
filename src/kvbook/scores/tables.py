"""Tables of log-probabilities: read from files, frames or tensors, checked, and joined row by row.

A row is one token of one sequence: ``id``, ``position``, ``token``, ``logprob``; also ``step``, the training step, and
``top_tokens`` with ``top_logprobs``, the likeliest tokens at that place, where there are any.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbook import UserError, refusing
from kvbook.scores import adapters

# Of rows, and of what `--json` prints; a row need not name it.
SCHEMA_VERSION = 1
COLUMNS = ("id", "position", "token", "logprob")
OPTIONAL = ("step", "top_tokens", "top_logprobs")
# Rows that are put into columns together: a million of them as Python objects would take more than a gigabyte.
_BLOCK = 50_000
# What rounding may leave above log 1.
_ABOVE_ZERO = 1e-5
# A table in other logarithms is another table times this, to far more digits than any two computations share.
_BASES = {"base 10": np.log(10), "base 2": np.log(2)}
_SAME_FACTOR = 1e-4


@dataclass(frozen=True)
class Joined:
    """The rows of the rollout's table, with what the others have for them.

    Attributes
    ----------
    ids : ndarray of object
        Names of the sequences.
    sequence, position, place : ndarray of int
        Of each token: which sequence, its position in it, and its place among the scored tokens, from 0.
    token, other_token : ndarray
        As the rollout and as the trainer has it.
    rollout, trainer : ndarray of float
        Log-probabilities.
    controls : list of ndarray of float
        The same of each control.
    step : ndarray of int or None
        The training step.
    top : tuple of Series or None
        The likeliest tokens of the rollout and of the trainer, each a Series of dicts from token to log-probability.
    left_out : int
        Rows of the trainer that the rollout has not.
    """

    ids: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    place: np.ndarray
    token: np.ndarray
    other_token: np.ndarray
    rollout: np.ndarray
    trainer: np.ndarray
    controls: list[np.ndarray] = field(default_factory=list)
    step: np.ndarray | None = None
    top: tuple[pd.Series, pd.Series] | None = None
    left_out: int = 0


def read(path: str | Path, side: adapters.Side = "rollout") -> pd.DataFrame:
    """Read a Parquet file, or JSON lines: rows of the table, or what an adapter knows; then `side` says whose."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    if path.suffix == ".parquet":
        with refusing(f"{path}: Parquet takes pyarrow: pip install pyarrow, or use JSON", ImportError):
            return pd.read_parquet(path)
    rows = _lines(path)
    if (first := next(rows, None)) is None:
        raise UserError(f"{path} is empty")
    rows = itertools.chain([first], rows)
    if adapter := adapters.of(first):
        return adapter.frame(rows, side)
    blocks = iter(lambda: list(itertools.islice(rows, _BLOCK)), [])
    return pd.concat((_columns(path, block) for block in blocks), ignore_index=True)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Parse a file's lines; a file may also be one JSON value over many lines."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if isinstance(row := _parsed(line), dict):
                yield row
            elif not line.isspace():
                whole = _parsed(path.read_text("utf-8"))
                rows = whole if isinstance(whole, list) else [whole]
                if not all(isinstance(row, dict) for row in rows):
                    raise UserError(f"{path}: line {number} is no JSON object: write one row a line")
                yield from rows
                return


def _parsed(text: str) -> Any:
    """Parse JSON; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _columns(path: Path, rows: list[dict[str, Any]]) -> pd.DataFrame:
    if (version := rows[0].get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise UserError(f"{path} has schema_version {version}, and this kvbook reads {SCHEMA_VERSION}: dump it again")
    names = [*COLUMNS, *(name for name in OPTIONAL if name in rows[0])]
    known = f"{', '.join(COLUMNS)}, or are of {', '.join(adapter.name for adapter in adapters.ADAPTERS)}"
    with refusing(lambda error: f"{path}: a row has no {error.args[0]}; rows have {known}", KeyError):
        return pd.DataFrame({name: [row[name] for row in rows] for name in names})


def frame(given: Any, mask: Any = None) -> pd.DataFrame:
    """Return a table as it is, and make one of a tensor or array of log-probabilities, shape (sequences, tokens)."""
    if isinstance(given, pd.DataFrame):
        return given
    values = adapters.array(given)
    if values.ndim != 2:
        raise UserError(f"log-probabilities of shape {values.shape}: give a table, or (sequences, tokens) with a mask")
    there = np.ones(values.shape, bool) if mask is None else adapters.array(mask).astype(bool)
    if there.shape != values.shape:
        raise UserError(f"a mask of shape {there.shape} is not for log-probabilities of shape {values.shape}")
    sequence, position = np.nonzero(there)
    # Without ids of tokens each place is its own token, on both sides.
    return pd.DataFrame({"id": sequence, "position": position, "token": 0, "logprob": values[there]})


def checked(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Refuse what cannot be compared: one line says what to mend."""
    if lacking := [column for column in COLUMNS if column not in table]:
        raise UserError(f"{name} has no column {lacking[0]}: it needs {', '.join(COLUMNS)}")
    if table.empty:
        raise UserError(f"{name} has no rows")
    with refusing(f"{name}: logprob and position must be numbers in every row, none missing", TypeError, ValueError):
        logprob, position = table["logprob"].to_numpy(np.float64), table["position"].to_numpy(np.int64)
    if (part := table["position"].to_numpy() != position).any():
        raise UserError(f"{name}: the position at {_row(table, part)} is no whole number")
    if not np.isfinite(logprob).all():
        at = _row(table, ~np.isfinite(logprob))
        raise UserError(f"{name}: the log-probability at {at} is no finite number; leave such tokens out of all tables")
    if (logprob > _ABOVE_ZERO).any():
        if ((logprob >= 0) & (logprob <= 1)).all():
            raise UserError(f"{name} has probabilities, all between 0 and 1: write their natural logarithms")
        raise UserError(f"{name}: the log-probability at {_row(table, logprob > _ABOVE_ZERO)} is above 0")
    codes, names = pd.factorize(table["id"])
    if len(names) - 1 != (codes[1:] != codes[:-1]).sum():
        raise UserError(f"{name}: the rows of a sequence must follow one another: sort by id and position")
    back = (codes[1:] == codes[:-1]) & (position[1:] <= position[:-1])
    if back.any():
        at = _row(table.iloc[1:], back)
        raise UserError(f"{name}: positions must grow within a sequence, and do not at {at}: sort by id and position")
    as_asked = (table["logprob"].dtype, table["position"].dtype) == (np.float64, np.int64)
    return table if as_asked else table.assign(logprob=logprob, position=position)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _row(table: pd.DataFrame, where: np.ndarray) -> str:
    # By column: a row of numbers alone would make the id a fraction.
    return f"id {table['id'][where].iloc[0]}, position {table['position'][where].iloc[0]}"


def join(rollout: pd.DataFrame, trainer: pd.DataFrame, controls: Sequence[pd.DataFrame] = ()) -> Joined:
    """Put what all tables say of the rollout's rows beside one another."""
    rollout = checked(rollout, "A")
    named = {"B": trainer, **{f"control {number}": table for number, table in enumerate(controls, 1)}}
    joined = {name: _of_rows(rollout, checked(table, name), name) for name, table in named.items()}
    for control in list(joined)[1:]:
        if (other := joined[control]["token"].to_numpy() != rollout["token"].to_numpy()).any():
            raise UserError(f"{control} has another token at {_row(rollout, other)}: let it score A's tokens")
    a, b = rollout["logprob"].to_numpy(), joined["B"]["logprob"].to_numpy()
    for base, factor in _BASES.items():
        for name, one, other in (("A", a, b), ("B", b, a)):
            if np.allclose(one * factor, other, rtol=_SAME_FACTOR, atol=1e-9) and np.abs(other).max() > 1e-3:
                raise UserError(f"{name} has logarithms to {base}: multiply them by {factor:.6f} to make them natural")
    codes, names = pd.factorize(rollout["id"])
    tops = all({"top_tokens", "top_logprobs"} <= set(table) for table in (rollout, joined["B"]))
    return Joined(
        ids=np.asarray(names, dtype=object), sequence=codes, position=rollout["position"].to_numpy(),
        place=rollout.groupby(codes).cumcount().to_numpy(), token=rollout["token"].to_numpy(),
        other_token=joined["B"]["token"].to_numpy(), rollout=a, trainer=b,
        controls=[joined[name]["logprob"].to_numpy() for name in joined if name != "B"],
        step=rollout["step"].to_numpy() if "step" in rollout else None,
        top=(_top(rollout), _top(joined["B"])) if tops else None, left_out=len(trainer) - len(rollout),
    )


def _top(table: pd.DataFrame) -> pd.Series:
    pairs = zip(table["top_tokens"], table["top_logprobs"], strict=True)
    return pd.Series([dict(zip(tokens, values, strict=True)) for tokens, values in pairs])


def _of_rows(rollout: pd.DataFrame, table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of a table for those of the rollout, in its order."""
    keys = ["id", "position"]
    # Two dumps of one batch are in one order; then there is nothing to look for.
    if len(table) == len(rollout) and all(np.array_equal(table[key], rollout[key]) for key in keys):
        return table
    one, other = rollout["id"].iloc[0], table["id"].iloc[0]
    if isinstance(one, str) != isinstance(other, str):
        raise UserError(f"A and {name} do not join: ids are as {_shown(one)} in A and as {_shown(other)} in {name}")
    found = pd.MultiIndex.from_frame(table[keys]).get_indexer(pd.MultiIndex.from_frame(rollout[keys]))
    if (missing := found < 0).any():
        lost = "none" if missing.all() else f"{len(rollout) - missing.sum():,}"
        lacks = f"{lost} of A's {len(rollout):,} rows are in {name}, which lacks {_row(rollout, missing)}"
        remedy = "dump both over the same tokens, with positions counted alike"
        raise UserError(f"A and {name} do not join: {lacks}; {remedy}")
    return table.iloc[found].reset_index(drop=True)
