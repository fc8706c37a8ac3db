"""Trying the switch on a model: every way to feed the same tokens against the full pass, bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from kvbook import older
from kvbook.exact.switch import row_invariant


@dataclass(frozen=True)
class Difference:
    """What one way of feeding the tokens gives, against the full pass.

    Attributes
    ----------
    way : str
        How the tokens were fed.
    rows : int
        Rows of logits that were compared.
    equal_rows : int
        Rows in which no bit differs.
    largest : float
        Largest absolute difference of the logits.
    """

    way: str
    rows: int
    equal_rows: int
    largest: float


def fed(model: PreTrainedModel, ids: torch.Tensor, sizes: list[int], cache: Cache) -> torch.Tensor:
    """Feed a text in chunks on top of a cache and give the logits of all its tokens.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    ids : Tensor of int64, shape (1, seq_len)
        The text.
    sizes : list of int
        Of the chunks, which make up the whole.
    cache : Cache
        Empty; filled in place.

    Returns
    -------
    Tensor, shape (seq_len, vocabulary_size)
    """
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits[0] for part in ids.split(sizes, 1)])


def _ways(model: PreTrainedModel, ids: torch.Tensor, static: bool) -> Iterator[tuple[str, torch.Tensor]]:
    # Late: who only switches waits for nothing that judges.
    from kvbook.diagnosis import execution_paths, feeding

    for name, path in execution_paths.of(execution_paths.VERIFY).items():
        if path.feed:
            yield name, path.feed(feeding.Fed(model), ids)[0]
            continue
        sizes = path.cut(ids.shape[1], None)
        yield f"{name}, dynamic cache", fed(model, ids, sizes, older.dynamic_cache(model.config))
        if static:
            yield f"{name}, static cache", fed(model, ids, sizes, older.static_cache(model, ids.shape[1] + 17))


def verify(model: PreTrainedModel, ids: torch.Tensor, static: bool = True) -> list[Difference]:
    """Feed the same tokens in every way under `row_invariant` and compare the logits bit for bit.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model, on its device.
    ids : Tensor of int64, shape (1, seq_len)
        Token ids, three or more; all are real tokens.
    static : bool
        Whether to try a static cache too; some models (Falcon with ALiBi) take none.

    Returns
    -------
    list of Difference
        One a way. The switch holds on this machine for this model and length if ``equal_rows == rows`` in each.
    """
    found = []
    with torch.inference_mode(), row_invariant(untried=True):
        full = model(ids, use_cache=False).logits[0]
        for way, logits in _ways(model, ids, static):
            equal = (logits == full).all(-1)
            largest = (logits.double() - full.double()).abs().max().item()
            found.append(Difference(way, equal.numel(), int(equal.sum()), largest))
    return found
