"""Which operation of a model is the first whose result for a token changes when fewer tokens come with it.

Two full passes are recorded, of a text and of its beginning, and compared operation by operation on the tokens that
they share.  No cache takes part, so every causal class can be asked.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvbook.measuring import agreement
from kvbook.measuring.replay import Call, Key, operations_of, rows_of


class FirstOperation(NamedTuple):
    """Where a pass of fewer tokens first is not bitwise identical.

    Attributes
    ----------
    rows : int
        Tokens of the shorter pass.
    function : str
        Of torch, that was called.
    call : Call
        The operation in that pass.
    on_equal_inputs : bool
        Whether all of its inputs are bitwise identical, so that the difference is its own.  Otherwise it lies where
        rows cannot be compared: sorted by expert, or scanned in chunks.
    """

    rows: int
    function: str
    call: Call
    on_equal_inputs: bool


def _equal(full: torch.Tensor, fewer: torch.Tensor, rows: int) -> bool:
    """Compare what two passes share; positions beyond the rows, as padding makes them, see later tokens."""
    expected = rows_of(full, fewer, first=True)
    if expected is None or expected.dtype != fewer.dtype:
        return False
    if full.ndim == fewer.ndim:
        for dimension, (has, ours) in enumerate(zip(full.shape, fewer.shape, strict=True)):
            if has > ours > rows:
                expected, fewer = (each.narrow(dimension, 0, rows) for each in (expected, fewer))
    return bool(agreement.bits_equal(expected, fewer).all())


def _between(full: dict[Key, Call], fewer: dict[Key, Call], rows: int) -> FirstOperation | None:
    """Find the first operation that differs on equal inputs; else the first that differs, if the last one does."""
    unequal, ended_equal = None, True
    for key, call in fewer.items():
        reference = full.get(key)
        ended_equal = reference is not None and _equal(reference.output, call.output, rows)
        if ended_equal:
            continue
        if reference is not None and rows_of(reference.output, call.output, first=True) is not None:
            # A mask may be there in one pass and not in the other.
            given = zip(reference.inputs, call.inputs, strict=False)
            if all(_equal(one, other, rows) for one, other in given):
                return FirstOperation(rows, key[1], call, True)
        unequal = unequal or FirstOperation(rows, key[1], call, False)
    return None if ended_equal else unequal


def first_operation(model: PreTrainedModel, ids: torch.Tensor, counts: Iterable[int]) -> FirstOperation | None:
    """Find the first operation, in order of execution, whose result for a token depends on how many come with it."""
    full, _ = operations_of(model, lambda: model(ids, use_cache=False))
    found = []
    for rows in counts:
        fewer, _ = operations_of(model, lambda rows=rows: model(ids[:, :rows], use_cache=False))
        found.append(_between(full, fewer, rows))
    return min(filter(None, found), key=lambda each: (not each.on_equal_inputs, each.call.order), default=None)
