"""Requests by token ids, and what is told of each token written: by an engine's server, or the library in process."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from kvbook.measuring import choosing
from kvbook.scores import adapters
from kvbook.server.client import Client, Refused
from kvbook.server.session import FIELDS
from kvreport.chapters.serving_engines.rows import BLOCK

# Likeliest tokens of each position, over which a divergence is taken.
TOP = 20


class Written(NamedTuple):
    """What was written after a prompt: per token its id, its log-probability, and those of the likeliest ids."""

    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]
    cached: int | None = None


def ask(server: Client, ids: Sequence[int], tokens: int, cold: Sequence[str] = ()) -> Written:
    """Have a prompt continued greedily; with the fields of `cold`, from nothing reused."""
    fresh = {name: FIELDS[name]() for name in cold}
    return written(server.continued(list(ids), tokens, logprobs=TOP, return_tokens_as_token_ids=True, **fresh))


def together(server: Client, prompts: Sequence[Sequence[int]], tokens: int, cold: Sequence[str] = ()) -> list[Written]:
    """Send several requests at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: ask(server, ids, tokens, cold), prompts))


def written(reply: Mapping[str, Any]) -> Written:
    """Read an answer whose tokens have ids: llama.cpp's form, or vLLM's."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    tokens, logprobs, likeliest = adapters.of_choice(reply["choices"][0], "id")
    if not tokens:
        raise Refused("the answer has no log-probabilities")
    top = [{_id(token): value for token, value in each.items()} for each in likeliest]
    return Written([_id(token) for token in tokens], logprobs, top, details.get("cached_tokens"))


def _id(token: int | str) -> int:
    """Read an id, in vLLM's form too, which is a text."""
    return int(str(token).removeprefix("token_id:"))


@torch.inference_mode()
def write(model: PreTrainedModel, prompts: list[list[int]], tokens: int, warm: bool = False) -> list[Written]:
    """Continue prompts together; warm ones compute only what follows the last whole block of a prefix cache."""
    cache, ids = DynamicCache(config=model.config), torch.tensor(prompts, device=model.device)
    cached = (ids.shape[1] - 1) // BLOCK * BLOCK if warm else 0
    if cached:
        model(ids[:, :cached], past_key_values=cache)
    found = [Written([], [], [], cached) for _ in prompts]
    for _, logits, chosen in choosing.written(model, ids[:, cached:], tokens, cache):
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        best = logs.topk(min(TOP, logs.shape[-1]))
        for row, one in enumerate(found):
            if not one.tokens or one.tokens[-1] not in choosing.ends_of(model):
                one.tokens.append(int(chosen[row]))
                one.logprobs.append(float(logs[row, chosen[row]]))
                one.top.append(dict(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)))
    return found


@torch.inference_mode()
def read(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of every token at each place of a text, by one pass without a cache."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    return model.get_output_embeddings()(hidden).log_softmax(-1)
