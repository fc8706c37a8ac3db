"""Requests that reuse nothing, and requests that may: how this server is asked for each.

A request is cold if the server says that it took no token from its cache, or, where it does not say, if it was asked
not to.  It is asked in one of these ways, the first that works:

- another server of the same engine, started without prefix caching (``--control``);
- ``cache_salt``, a new one per request: vLLM and SGLang share a prefix only within a salt;
- ``cache_prompt: false``, which llama.cpp's server takes.

Where none works, only the first request with a new first line is cold.  The same request cannot be cold twice then, nor
cold in another shape, so nothing shows how much rounding is usual.
"""

import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvbook.server.client import Answer, Client, Refused, Unanswered

NEW_TOKENS = 8
# What any request may take from the cache: the token that begins every text.
BEGINNING = 1
_TRIES = 3
FIRST = "only the first request with a new first line"
# Servers ignore a field that they do not know, except strict ones.
FIELDS = {"cache_salt": lambda: uuid.uuid4().hex, "cache_prompt": lambda: False}
_WAYS = (" and ".join(FIELDS), *FIELDS)


class NotCold(Exception):
    """The server reused a prefix for a request that was meant to reuse nothing."""


@dataclass
class Session:
    """One check of one server: how it is asked for nothing reused, and what it was asked so far."""

    client: Client
    control: Client | None = None
    way: str = FIRST
    # Whether the server says how many tokens it took from its cache, and the most that it took.
    reports: bool = False
    reused: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)

    def settle(self, prompt: str) -> None:
        """Find out how this server is asked for nothing reused."""
        self.warm(prompt)
        self.warm(prompt)
        for way in ("--control",) if self.control else _WAYS:
            self.way = way
            with suppress(Refused, NotCold):
                self.cold(prompt)
                return
        self.way = FIRST

    @property
    def repeats(self) -> bool:
        """Tell whether the same request can be cold more than once."""
        return self.way != FIRST

    def warm(self, prompt: str, tokens: int = NEW_TOKENS) -> Answer:
        """Ask as any user does."""
        answer = self._ask(self.client, prompt, tokens)
        self.reports |= answer.cached is not None
        self.reused = max(self.reused, answer.cached or 0)
        return answer

    def cold(self, prompt: str, tokens: int = NEW_TOKENS) -> Answer:
        """Ask so that nothing is reused; again where a lost connection has left the prompt in the cache."""
        for _ in range(_TRIES):
            fields = {name: value() for name, value in FIELDS.items() if name in self.way}
            answer = self._ask(self.control or self.client, prompt, tokens, **fields)
            if (answer.cached or 0) <= BEGINNING:
                return answer
        raise NotCold(f"{answer.cached} of {answer.prompt_tokens} tokens came from the cache")

    def together(self, ask: Callable[[str], Answer], prompts: Iterable[str]) -> list[Answer]:
        """Ask for several at the same time."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, prompts))

    def _ask(self, client: Client, prompt: str, tokens: int, **more: Any) -> Answer:
        request = {"prompt": prompt, "max_tokens": tokens, **more}
        try:
            answer = client.ask(prompt, tokens, **more)
        except (Refused, Unanswered) as error:
            self.asked.append(request | {"error": str(error)})
            raise
        self.asked.append(request | {"text": answer.text, "cached": answer.cached, "logprobs": answer.logprobs})
        return answer
