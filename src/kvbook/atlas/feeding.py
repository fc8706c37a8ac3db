"""The execution paths of the atlas: a text of 24 tokens, fed to a tiny model in every way."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from kvbook.atlas.configurations import text
from kvbook.atlas.names import BATCH, CHUNKED, CROPPED, LENGTH, PADDED, PADDED_STEPWISE, STATIC, STEPWISE, WHOLE
from kvbook.diagnosis import feeding
from kvbook.diagnosis.feeding import Fed, NoCache, full, in_parts, onto_its_own_prompt

__all__ = [
    "CHUNKS", "LENGTH", "PADDED", "PATHS", "STATIC", "STEPS", "WHOLE", "Fed", "NoCache", "full", "in_parts",
    "is_causal", "look_at", "onto_its_own_prompt",
]

PADDING = 3
# MPT makes no mask for a single token on an empty cache, and fails; so every path begins with two tokens or more.
CHUNKS = [5, 7, 1, 6, 5]
STEPS = [2, *[1] * (LENGTH - 2)]
# How many wrong tokens are fed, and cropped away again.
_CROPPED_AT, _CROPPED = 10, 4


def look_at(model: PreTrainedModel) -> Fed:
    """Find out what a model's cache is called and what it is."""
    return feeding.look_at(model, text(4).to(model.device))


PATHS: dict[str, Callable[[Fed, torch.Tensor], torch.Tensor]] = {
    STEPWISE: lambda fed, ids: in_parts(fed, ids, STEPS)[0],
    CHUNKED: lambda fed, ids: in_parts(fed, ids, CHUNKS)[0],
    STATIC: lambda fed, ids: feeding.static(fed, ids, CHUNKS, LENGTH + 7),
    BATCH: feeding.in_batch,
    PADDED: lambda fed, ids: feeding.left_padded(fed, ids, PADDING),
    PADDED_STEPWISE: lambda fed, ids: feeding.left_padded_in_parts(fed, ids, PADDING, STEPS),
    CROPPED: lambda fed, ids: feeding.cropped(fed, ids, _CROPPED_AT, _CROPPED),
    # Not all tokens: after whole chunks of Llama 4 a prompt that is fed twice changes nothing.
    WHOLE: lambda fed, ids: onto_its_own_prompt(fed, ids[:, :-1])[0],
}


def is_causal(fed: Fed, ids: torch.Tensor) -> bool:
    """Tell whether a full pass leaves earlier logits as they are, but for rounding, whatever follows and however much.

    Where it does not, no cache can agree with it, and none is at fault: ProphetNet's streams change with a text's
    length.
    """
    other = ids.clone()
    other[:, -1] = 17 + (other[:, -1] + 40) % 200
    given = full(fed, ids).double()
    fewer = ids.shape[1] // 2
    pairs = [(full(fed, other).double()[:, :-1], given[:, :-1]), (full(fed, ids[:, :fewer]).double(), given[:, :fewer])]
    return all(bool((one - another).abs().max() < 1e-4 * given.std()) for one, another in pairs)
