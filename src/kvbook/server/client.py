"""Requests to an OpenAI-compatible server: bounded in time, size and number of tries.

The token for a server that wants one is read from the environment, sent, and never written.
"""

import http.client
import ipaddress
import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvbook import UserError, refusing
from kvbook.scores import adapters

TOKEN = "KVBOOK_SERVER_TOKEN"
# Log-probabilities per position: OpenAI's own limit.
TOP = 5
_TRIES, _PAUSE = 4, 0.25
_MOST_BYTES = 8 * 2**20
# Statuses that another try may mend.
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class Unanswered(Exception):
    """The server gave no answer in time, after all tries."""


class Refused(Exception):
    """The server answered that it will not do what was asked."""


class Answer(NamedTuple):
    """What a server wrote after a prompt, one entry per generated token.

    Attributes
    ----------
    tokens, logprobs : tuple
        What was chosen, and its log-probability.
    top : tuple of dict
        The likeliest tokens with their log-probabilities; the chosen one is among them.
    text : str
        The same as text.
    prompt_tokens, cached : int or None
        As the server counts them; None where it does not say.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]
    text: str
    prompt_tokens: int | None
    cached: int | None


class Client(NamedTuple):
    """One server."""

    address: str
    timeout: float = 60.0
    model: str = ""

    def ask(self, prompt: str, tokens: int, **more: Any) -> Answer:
        """Have a prompt continued greedily."""
        return answer_of(self.continued(prompt, tokens, logprobs=TOP, **more))

    def continued(self, prompt: str | list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """Have a text or its tokens' ids continued greedily; return the answer as it is."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        return self.call("POST", "/completions", body)

    def models(self) -> list[str]:
        """List what the server serves."""
        listed = self.call("GET", "/models").get("data")
        return [str(each["id"]) for each in listed if isinstance(each, dict) and "id" in each] if listed else []

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request; try again where that may help."""
        for left in reversed(range(_TRIES)):
            try:
                status, text = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if status not in _PASSING:
                    return _read(status, text)
                why = f"status {status}: {_message(text)}"
            if left:
                time.sleep(_PAUSE * 2 ** (_TRIES - 1 - left))
        raise Unanswered(why)

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        parts = urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        end = time.monotonic() + self.timeout
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        try:
            connection.request(method, parts.path.rstrip("/") + path, json.dumps(body) if body else None, headers)
            reply = connection.getresponse()
            read = b""
            # A server that sends a byte now and then must not hold us beyond the limit.
            while part := reply.read1(2**16):
                read += part
                if len(read) > _MOST_BYTES:
                    raise http.client.HTTPException("the answer is too long")
                if time.monotonic() > end:
                    raise TimeoutError(f"no whole answer in {self.timeout:g} s")
            return reply.status, read
        finally:
            connection.close()


def of(address: str, remote: bool = False, timeout: float = 60.0, model: str = "") -> Client:
    """Make the client of an address, or refuse the address."""
    said, remedy = f"{address} is no address of a server", "try http://127.0.0.1:8000/v1"
    with refusing(lambda error: f"{said} ({error}): {remedy}", ValueError):
        parts = urlsplit(address)
        # Read here, for a port that is no number is found only then.
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    if not valid or parts.query or parts.fragment:
        raise UserError(f"{said}: {remedy}")
    if parts.username or parts.password:
        raise UserError(f"leave name and password out of the address: a token is read from {TOKEN}")
    here = _is_here(parts.hostname)
    if not here and not remote:
        remedy = "the check sends about 100 requests; add --remote if the server's owner allows that"
        raise UserError(f"{parts.hostname} is not this machine: {remedy}")
    if not here and parts.scheme == "http" and os.environ.get(TOKEN):
        raise UserError(f"{TOKEN} is set, and {parts.hostname} is reached without encryption: use https, or unset it")
    return Client(address.rstrip("/"), timeout, model)


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(status: int, text: bytes) -> dict[str, Any]:
    if status != 200:
        raise Refused(f"status {status}: {_message(text)}" + f"; a token is read from {TOKEN}" * (status in (401, 403)))
    try:
        read = json.loads(text)
    except ValueError:
        raise Refused("the answer is not JSON") from None
    if not isinstance(read, dict):
        raise Refused("the answer is not a JSON object")
    return read


def _message(text: bytes) -> str:
    """Take the server's own words from an answer, in one short line without the token."""
    try:
        read = json.loads(text)
        found = read.get("error", read) if isinstance(read, dict) else read
        words = str(found.get("message", found.get("detail", found)) if isinstance(found, dict) else found)
    except ValueError:
        words = text.decode("utf-8", "replace")
    if token := os.environ.get(TOKEN):
        words = words.replace(token, "…")
    return " ".join(words.split())[:160] or "no reason given"


def answer_of(reply: Mapping[str, Any]) -> Answer:
    """Read an answer with log-probabilities, in OpenAI's older form or its newer one."""
    try:
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        tokens, logprobs, top = adapters.of_choice(choice)
        likeliest = zip(tokens, logprobs, top or [{}] * len(tokens), strict=True)
        whole = tuple(likely | {token: value} for token, value, likely in likeliest)
        text, counted, cached = choice["text"], usage.get("prompt_tokens"), details.get("cached_tokens")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"the answer has another form than OpenAI's ({type(error).__name__}: {error})") from None
    if not tokens or None in logprobs:
        raise Refused("the answer has no log-probabilities")
    return Answer(tuple(tokens), tuple(logprobs), whole, text, counted, cached)
