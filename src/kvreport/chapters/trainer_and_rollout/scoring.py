"""Log-probabilities of the tokens of texts: token by token on a cache, in chunks, and in one pass without a cache.

Every function returns a mapping of columns to tensors of shape (texts, new tokens).  The logits are those of the output
head on the last hidden states, which holds for Llama and its kin.
"""

import functools

import torch
from torch.nn.functional import linear
from transformers import Cache, DynamicCache, PreTrainedModel

from kvbook.measuring import choosing, predictions
from kvbook.models import corpus
from kvreport.chapters.trainer_and_rollout import rows as named

Columns = dict[str, torch.Tensor]


def _picked(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].double()


@functools.lru_cache(maxsize=1)
def _in_fp32(weight: torch.Tensor) -> torch.Tensor:
    """Convert the head's weights once for all tokens of a model; nothing trains it meanwhile."""
    return weight.float()


def logprobs(
    model: PreTrainedModel, way: str, hidden: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor | None = None
) -> Columns:
    """Score tokens from the hidden states before each: as is usual, with a head in fp32, and with a low softmax."""
    head = model.get_output_embeddings()
    logits = head(hidden) if logits is None else logits
    columns = {way: _picked(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens)}
    if logits.dtype in (torch.bfloat16, torch.float16):
        columns[way + named.FP32_HEAD] = _picked(linear(hidden.float(), _in_fp32(head.weight)), tokens)
        columns[way + named.LOW_SOFTMAX] = _picked(logits, tokens)
    return columns


def one_pass(model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int) -> Columns:
    """Score each text alone in one pass, as a trainer does."""
    hidden = (model.base_model(one, use_cache=False).last_hidden_state[:, prompt - 1 : -1] for one in ids.split(1))
    new = ids[:, prompt:].split(1)
    return joined([logprobs(model, way, *text) for text in zip(hidden, new, strict=True)])


def padded(model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int) -> Columns:
    """Score texts in one batch, each after another number of padding tokens that the mask hides."""
    texts, length = ids.shape
    widest = 3 * texts
    batch, mask = ids[:, :1].repeat(1, widest + length), ids.new_zeros(texts, widest + length)
    # No two start at one place, and none at the first.
    slices = [slice(3 * (row + 1), 3 * (row + 1) + length) for row in range(texts)]
    for row, place in enumerate(slices):
        batch[row, place], mask[row, place] = ids[row], 1
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = model.base_model(batch, attention_mask=mask, position_ids=places, use_cache=False).last_hidden_state
    found = torch.stack([hidden[row, place][prompt - 1 : -1] for row, place in enumerate(slices)])
    return logprobs(model, way, found, ids[:, prompt:])


def cached(
    model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int, at_once: int = 1, cache: Cache | None = None
) -> Columns:
    """Score texts together on a cache that holds their prompts: some tokens at once."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    # The prompt's last token scores the first new one; the last new one is never read.
    parts = [ids[:, :prompt], *(ids[:, prompt:-1].split(at_once, 1) if ids.shape[1] > prompt + 1 else ())]
    scored, place = [], prompt
    for part in parts:
        hidden = model.base_model(part, past_key_values=cache, use_cache=True).last_hidden_state
        hidden = hidden if scored else hidden[:, -1:]
        scored.append(logprobs(model, way, hidden, ids[:, place : place + hidden.shape[1]]))
        place += hidden.shape[1]
    return joined(scored, 1)


def joined(parts: list[Columns], dim: int = 0) -> Columns:
    """Put columns together: those of further texts, or along the tokens of the same ones."""
    return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}


def write(
    model: PreTrainedModel, way: str, prompts: list[corpus.Sample], new_tokens: int, seed: int
) -> tuple[torch.Tensor, Columns]:
    """Continue prompts together with a cache; return the whole texts, and the columns of what was sampled."""
    head, cache = model.get_output_embeddings(), DynamicCache(config=model.config)
    ids = fed = torch.tensor([one.ids for one in prompts], device=model.device)
    texts, parts = [one.index for one in prompts], []
    for step in range(new_tokens):
        hidden = model.base_model(fed, past_key_values=cache, use_cache=True).last_hidden_state[:, -1:]
        logits = head(hidden)
        fed = choosing.greedy(predictions.noisy(logits[:, -1], seed, texts, step))[:, None]
        ids = torch.cat([ids, fed], 1)
        parts.append(logprobs(model, way, hidden, fed, logits) | processed(logits, fed))
    return ids, joined(parts, 1)


def processed(logits: torch.Tensor, tokens: torch.Tensor) -> Columns:
    """Return what temperature, top-k and top-p make of a token's log-probability.

    Where top-k or top-p keeps a token, its processed log-probability is the raw one less the log of the mass kept.
    """
    logs = logits.float().log_softmax(-1)
    rank = (logs > logs.gather(-1, tokens[..., None])).sum(-1)
    masses = logs.sort(descending=True).values.exp().cumsum(-1, dtype=torch.float64)
    # The smallest set whose mass reaches p: as many tokens as stay below it, and one more.
    below = (masses < named.TOP_P).sum(-1)
    top_k = min(named.TOP_K, masses.shape[-1])
    return {
        named.COOLED: _picked(logits.float() / named.TEMPERATURE, tokens),
        named.MASS_K: masses[..., top_k - 1].log(), named.IN_K: (rank < top_k).double(),
        named.MASS_P: masses.gather(-1, below[..., None])[..., 0].log(), named.IN_P: (rank <= below).double(),
    }
