"""`kvbook demo`: a sound model and one with a fault, made on the spot; no file and no network is needed."""

import time
from collections.abc import Callable
from contextlib import nullcontext

import pandas as pd
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbook.diagnosis import check, faults, outcome, probe
from kvbook.models import corpus

_SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
)
_TEXTS = [corpus.Sample(index, "random", 0, list(range(10 * index, 10 * index + 12))) for index in range(2)]


def outcomes() -> list[outcome.Outcome]:
    """Check both."""
    return [
        _checked("a sound model", lambda _model: nullcontext()),
        _checked("the same model, new positions counted from 0", faults.offset_forgotten),
    ]


def _checked(name: str, fault: Callable[[LlamaForCausalLM], faults.Injected]) -> outcome.Outcome:
    start, rows = time.monotonic(), []
    for dtype in ("float64", "float32"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(_SHAPE).eval().requires_grad_(False).to(getattr(torch, dtype))
        with fault(model):
            rows += probe.rows_of(model, dtype, _TEXTS, together=len(_TEXTS))
    nothing = pd.DataFrame()
    return outcome.Outcome(
        model=name, weights="random", layers=_SHAPE.num_hidden_layers, parameters=model.num_parameters(), device="cpu",
        threads=torch.get_num_threads(), texts=len(_TEXTS), tokens=len(_TEXTS[0].ids), left_out={},
        not_tried=["float16", "bfloat16"], seconds=time.monotonic() - start, versions=check.VERSIONS,
        **check.judged(pd.DataFrame(rows), True, 0, nothing, nothing),
    )
