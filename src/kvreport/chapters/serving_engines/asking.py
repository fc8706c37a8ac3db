"""Requests to an engine's server by token ids, and what it tells of each token that it writes."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvbook.scores import adapters
from kvbook.server.client import Client, Refused
from kvbook.server.session import FIELDS

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
