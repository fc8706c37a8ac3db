"""What trainers and engines write, as tables of log-probabilities: one flat list, `ADAPTERS`.

None of these formats names its sequences, so they are numbered in their order: dump both sides in one order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

# Whose log-probabilities are meant, where a dump holds those of both.
Side = Literal["rollout", "trainer"]
# One scored sequence: the position of its first token, tokens, log-probabilities, and the likeliest at each place.
Sequence = tuple[int, list[Any], list[float], list[dict[Any, float]] | None]


@dataclass(frozen=True)
class Adapter:
    """How one format is known and read.

    Attributes
    ----------
    name : str
        Of the format.
    marks : tuple of str
        Fields that a record has, wherever it is nested.
    sequences : callable
        Reads a record: the sequences of one side.
    """

    name: str
    marks: tuple[str, ...]
    sequences: Callable[[Any, Side], Iterator[Sequence]]

    def frame(self, records: Iterable[Any], side: Side = "rollout") -> pd.DataFrame:
        """Read records, of JSON or Python objects, as a table."""
        parts: dict[str, list[Any]] = {name: [] for name in ("id", "position", "token", "logprob", "top")}
        sequences = (sequence for record in records for sequence in self.sequences(record, side))
        for number, (start, tokens, logprobs, top) in enumerate(sequences):
            parts["id"] += [number] * len(tokens)
            parts["position"] += range(start, start + len(tokens))
            parts["token"] += tokens
            parts["logprob"] += logprobs
            parts["top"] += top or []
        tops = parts.pop("top")
        table = pd.DataFrame(parts)
        if len(tops) != len(table) or not any(len(top) > 1 for top in tops):
            return table
        return table.assign(top_tokens=[list(top) for top in tops], top_logprobs=[list(top.values()) for top in tops])


def array(values: Any) -> np.ndarray:
    """Return what may be a tensor, of any dtype and on any device, as an array."""
    return np.asarray(values.detach().float().cpu() if hasattr(values, "detach") else values)


def _field(record: Any, name: str) -> Any:
    """Read a field of a JSON object or of a Python object."""
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)


def _batch(ids: Any, logprobs: Any, mask: Any, lengths: Any) -> Iterator[Sequence]:
    """Read padded rows of a batch, shape (sequences, tokens)."""
    ids, logprobs, mask = array(ids).astype(int), array(logprobs), array(mask).astype(bool)
    if logprobs.ndim == 1:
        ids, logprobs, mask, lengths = ids[None], logprobs[None], mask[None], [lengths]
    for row, length in enumerate(np.asarray(lengths).tolist()):
        there = mask[row]
        yield int(length), ids[row][there].tolist(), logprobs[row][there].tolist(), None


# huggingface/trl, trl/trainer/grpo_trainer.py: what `_generate_and_score_completions` returns.
def _trl(record: Any, side: Side) -> Iterator[Sequence]:
    name = "sampling_per_token_logps" if side == "rollout" else "old_per_token_logps"
    lengths = array(_field(record, "prompt_mask")).sum(-1)
    return _batch(_field(record, "completion_ids"), _field(record, name), _field(record, "completion_mask"), lengths)


# volcengine/verl, verl/utils/debug/metrics.py: the fields of `DataProto.batch` that `calculate_debug_metrics` compares.
def _verl(record: Any, side: Side) -> Iterator[Sequence]:
    name = "rollout_log_probs" if side == "rollout" else "old_log_probs"
    ids, whole = array(_field(record, "responses")), array(_field(record, "attention_mask"))
    n = ids.shape[-1]
    mask = _field(record, "response_mask")
    mask = whole[..., -n:] if mask is None else mask
    return _batch(ids, _field(record, name), mask, whole[..., :-n].sum(-1))


# vllm-project/vllm, vllm/outputs.py: `RequestOutput`, whose outputs have a dict of `Logprob` for each token.
def _vllm(record: Any, _side: Side) -> Iterator[Sequence]:
    start = len(_field(record, "prompt_token_ids"))
    for output in _field(record, "outputs"):
        tokens = list(_field(output, "token_ids"))
        top = [{int(token): float(_field(of, "logprob")) for token, of in place.items()}
               for place in _field(output, "logprobs")]
        yield start, tokens, [place[token] for token, place in zip(tokens, top, strict=True)], top


# The response of /v1/chat/completions and of /v1/completions with `logprobs`; tokens are texts there.
def _openai(record: Any, _side: Side) -> Iterator[Sequence]:
    start = int((_field(record, "usage") or {}).get("prompt_tokens", 0))
    for choice in _field(record, "choices"):
        yield start, *of_choice(choice)


def of_choice(choice: Any, name: str = "token") -> tuple[list[Any], list[float], list[dict[Any, float]]]:
    """Read tokens, log-probabilities and the likeliest of an OpenAI-compatible choice, of the newer form or the older.

    What it does not have is empty.  In the newer form `name` is the field that names a token.
    """
    found = _field(choice, "logprobs") or {}
    if content := found.get("content"):
        top = [{each[name]: each["logprob"] for each in place.get("top_logprobs") or ()} for place in content]
        return [place[name] for place in content], [place["logprob"] for place in content], top
    top = [dict(place or {}) for place in found.get("top_logprobs") or ()]
    return list(found.get("tokens") or ()), list(found.get("token_logprobs") or ()), top


TRL = Adapter("TRL", ("completion_ids", "sampling_per_token_logps"), _trl)
VERL = Adapter("verl", ("responses", "rollout_log_probs"), _verl)
VLLM = Adapter("vLLM", ("prompt_token_ids", "outputs"), _vllm)
OPENAI = Adapter("an OpenAI-compatible response", ("choices",), _openai)
ADAPTERS = (TRL, VERL, VLLM, OPENAI)


def of(record: Any) -> Adapter | None:
    """Say which format a record is of, or None."""
    return next((each for each in ADAPTERS if all(_field(record, mark) is not None for mark in each.marks)), None)
