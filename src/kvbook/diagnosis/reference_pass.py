"""Whether a model's full pass can be a reference: the same from call to call, and blind to what follows a token."""

import torch
from transformers import PreTrainedModel

from kvbook.diagnosis import probe, verdict
from kvbook.measuring.in_fp64 import widened

NOT_REPEATABLE = "gives other logits each time that it is called"
NOT_CAUSAL = "gives earlier tokens other logits when later tokens follow"


def fault(model: PreTrainedModel, ids: torch.Tensor, every_length: bool = True) -> str | None:
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
