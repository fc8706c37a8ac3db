"""Requests to an engine's server by token ids, and what it tells of each token that it writes."""

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvbook.server.client import Client, Refused

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
    body = {
        "model": server.model, "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "logprobs": TOP,
        "return_tokens_as_token_ids": True,
    }
    fresh = {"cache_salt": uuid.uuid4().hex, "cache_prompt": False}
    return written(server.call("POST", "/completions", body | {name: fresh[name] for name in cold}))


def together(server: Client, prompts: Sequence[Sequence[int]], tokens: int, cold: Sequence[str] = ()) -> list[Written]:
    """Send several requests at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: ask(server, ids, tokens, cold), prompts))


def written(reply: Mapping[str, Any]) -> Written:
    """Read an answer whose tokens have ids: llama.cpp's form, or vLLM's."""
    told = reply["choices"][0].get("logprobs") or {}
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    if content := told.get("content"):
        top = [{each["id"]: each["logprob"] for each in one["top_logprobs"]} for one in content]
        tokens, logprobs = [one["id"] for one in content], [one["logprob"] for one in content]
    elif told.get("tokens"):
        top = [{_id(name): value for name, value in each.items()} for each in told["top_logprobs"]]
        tokens, logprobs = [_id(name) for name in told["tokens"]], told["token_logprobs"]
    else:
        raise Refused("the answer has no log-probabilities")
    return Written(tokens, logprobs, top, details.get("cached_tokens"))


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
