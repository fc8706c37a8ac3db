"""Which of two passes that disagree is the wrong one: that with a cache, or that without.

A full pass can be a reference where it is the same from call to call, and blind to what follows a token.
"""

import itertools
import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from kvbook.diagnosis import execution_paths, feeding, probe, verdict
from kvbook.measuring.in_fp64 import widened

NOT_REPEATABLE = "gives other logits each time that it is called"
NOT_CAUSAL = "gives earlier tokens other logits when later tokens follow"
CACHED, UNCACHED = "the cached pass is wrong", "the uncached pass is wrong"
UNTOLD = "cannot tell which pass is wrong"
# A model whose loss is not below this share of a blind guess's knows nothing of the text.
_KNOWS = 0.8
# Nats for each token by which the losses must differ.
_LOSS = 0.05


def reference_fault(model: PreTrainedModel, ids: torch.Tensor, every_length: bool = True) -> str | None:
    """Say what is wrong with the full pass of a text of shape (1, seq_len); None where a cache could agree with it.

    A class that keeps the keys of the highest scores chooses among equal ones by the length of the row, so that only
    some lengths show it: every one is tried, or, where each pass reads all weights from a disk, half of the text alone.
    """
    limit = verdict.LIMIT * torch.finfo(model.dtype).eps / 2
    with torch.inference_mode(), widened(model.dtype):
        whole = model(ids, use_cache=False).logits[0]
        # The whole text once more, and then its beginnings.
        shorter = range(2, ids.shape[1]) if every_length else (max(2, ids.shape[1] // 2),)
        for length in (ids.shape[1], *shorter):
            first = model(ids[:, :length], use_cache=False).logits[0]
            if (probe.relative(whole[:length], first, centred=True) > limit).any():
                return NOT_REPEATABLE if length == ids.shape[1] else NOT_CAUSAL
    return None


def find(model: PreTrainedModel, texts: Sequence[torch.Tensor]) -> tuple[str, list[str]]:
    """Judge the passes of texts of shape (1, n), which differ by more than rounding; return the verdict and the why."""
    evidence: list[tuple[str, str]] = []
    with torch.inference_mode(), widened(model.dtype):
        fed = feeding.look_at(model, texts[0][:, :4])
        if fed.name is None:
            return UNTOLD, ["no cache is returned"]
        evidence += _by_agreement(fed, texts[0])
        if reference_fault(model, texts[0]) == NOT_CAUSAL:
            evidence.append((UNCACHED, "in the uncached pass a later token moves an earlier logit"))
        evidence += _by_loss(fed, texts)
    sides = {side for side, _ in evidence}
    why = [said for _, said in evidence] or ["no evidence for either"]
    return (sides.pop() if len(sides) == 1 else UNTOLD), why


def _by_agreement(fed: feeding.Fed, ids: torch.Tensor) -> list[tuple[str, str]]:
    """Compare ways to fill a cache with each other: what a right cache gives does not depend on the cuts."""
    length = ids.shape[1]
    at_once = fed.in_parts(ids, [length])[0]
    cuts = (execution_paths.steps(length), execution_paths.chunks(length), [length // 2, length - length // 2])
    found = [at_once, *(fed.in_parts(ids, cut)[0] for cut in cuts)]
    alike = fed.agree(fed.full(ids), at_once)
    if all(fed.agree(*pair) for pair in itertools.combinations(found, 2)):
        return [] if alike else [(UNCACHED, "however a text is cut, the passes with a cache agree with each other")]
    # Two halves that are wrong in one way are no evidence against the third.
    return [(CACHED, "how a text is cut changes the logits of the passes with a cache")] if alike else []


def _by_loss(fed: feeding.Fed, texts: Sequence[torch.Tensor]) -> list[tuple[str, str]]:
    """Compare how well both predict the texts, where the model has learnt to."""
    uncached = _loss([fed.full(ids) for ids in texts], texts)
    cached = _loss([fed.in_parts(ids, execution_paths.steps(ids.shape[1]))[0] for ids in texts], texts)
    blind = math.log(fed.model.config.get_text_config().vocab_size)
    if min(cached, uncached) > _KNOWS * blind or abs(cached - uncached) < _LOSS:
        return []
    said = f"the text's loss is {cached:.2f} nats a token with a cache and {uncached:.2f} without"
    return [(CACHED if cached > uncached else UNCACHED, said)]


def _loss(logits: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> float:
    both = zip(logits, texts, strict=True)
    return fmean(functional.cross_entropy(each[0, :-1].float(), ids[0, 1:]).item() for each, ids in both)
