"""The one rule by which every experiment chooses a token: the largest logit, and on an exact tie the lowest index.

`generate` and `torch.argmax` have the same rule.  `torch.topk` promises no order among equal values, and its first
index is often another one; in 16 bits exact ties are common enough to change texts.
"""

from collections.abc import Iterator

import torch
from transformers import Cache, PreTrainedModel


def greedy(scores: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest number along the last dimension, the lowest where several are equal."""
    return scores.argmax(-1)


def margin(scores: torch.Tensor) -> torch.Tensor:
    """Return the largest number along the last dimension minus the second largest; 0 on an exact tie."""
    # The difference of two 16-bit numbers would round.
    best = (scores if scores.itemsize > 4 else scores.float()).topk(2).values
    return best[..., 0] - best[..., 1]


def tied(scores: torch.Tensor, one: int, other: int) -> int:
    """Tell by 1 or 0 whether two candidates have equal numbers in one row."""
    return int(scores[one] == scores[other])


def ends(model: PreTrainedModel) -> set[int]:
    """Return the tokens that end a text."""
    of = model.generation_config.eos_token_id
    return set(of) if isinstance(of, list) else {of}


def written(
    model: PreTrainedModel, ids: torch.Tensor, n_new: int, cache: Cache | None = None, **options
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Write on greedily; of each step give what was fed, the last token's logits, and the token that they choose.

    With a cache each step feeds the tokens that it does not hold, and without one all of them anew.
    """
    fed, cached = ids, {"use_cache": False} if cache is None else {"past_key_values": cache}
    for _ in range(n_new):
        logits = model(fed, **cached, **options).logits[:, -1]
        token = greedy(logits)[:, None]
        yield fed, logits, token
        fed = torch.cat([fed, token], 1) if cache is None else token
