"""The one rule by which every experiment chooses a token: the largest logit, and on an exact tie the lowest index.

`generate` and `torch.argmax` have the same rule.  `torch.topk` promises no order among equal values, and its first
index is often another one; in 16 bits exact ties are common enough to change texts.
"""

import torch


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
