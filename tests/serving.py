"""A small server of ours with OpenAI's completions, log-probabilities and prefix reuse; faults can be injected.

It runs a model of transformers, or any that the tests build, keeps keys and values of every request, and lets later
ones reuse whole blocks of them.
"""

import copy
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import DynamicCache

from kvbook.measuring import caches
from kvbook.server import prompts

FAULTS = ("stale prefix", "wrong block at a boundary", "leak between conversations", "positions off by one")


class Words:
    """A tokenizer for models that never saw text: every word and every comma is a token."""

    def __init__(self, vocabulary):
        words = [*(f" {word}" for word in prompts.WORDS), " means", ",", " Now", " Then"]
        self.pieces = words + [f" w{place}" for place in range(len(words), vocabulary)]
        self.ids = {piece: place for place, piece in enumerate(self.pieces)}

    def encode(self, text):
        return [self.ids[piece] for piece in re.findall(r" \w+|,", text)]

    def decode(self, ids):
        return "".join(self.pieces[place] for place in ids)


@dataclass
class Engine:
    """A model with a cache of prefixes.

    Attributes
    ----------
    block : int
        Tokens that are reused together; 0 for no reuse at all.
    fault : str
        One of `FAULTS`.
    batches : bool
        Whether requests that are in flight together are computed as one batch.
    """

    model: object
    tokenizer: object
    block: int = 16
    fault: str = ""
    batches: bool = False
    kept: list = field(default_factory=list)
    flying: int = 0
    one: object = field(default_factory=threading.Lock)
    arrived: object = field(default_factory=threading.Condition)

    def answer(self, prompt, tokens, salt):
        with self.arrived:
            self.flying += 1
            self.arrived.notify_all()
            # Another that was sent at the same time has arrived by then.
            if self.batches or "leak" in self.fault:
                self.arrived.wait_for(lambda: self.flying > 1, 0.15)
        try:
            with self.one, torch.inference_mode():
                return self._generate(self.tokenizer.encode(prompt), tokens, salt)
        finally:
            with self.arrived:
                self.flying -= 1

    def _generate(self, ids, tokens, salt):
        cached, cache = self._reused(ids, salt)
        shift = int(self.fault == "positions off by one" and cached > 0)
        rows = self.flying if self.batches else 1
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        fed, told, seen = ids[cached:], [], list(ids)
        for _ in range(tokens):
            start = cache.get_seq_length()
            positions = torch.arange(start, start + len(fed))[None] + shift
            logits = self.model(
                torch.tensor([fed] * rows), past_key_values=cache, position_ids=positions.expand(rows, -1),
            ).logits[0, -1]
            told.append(torch.log_softmax(logits.double(), -1))
            fed = [int(logits.argmax())]
            seen += fed
        cache.batch_select_indices(torch.tensor([0]))
        # The last token was never fed.
        self.kept.append((salt, seen[:-1], cache))
        return seen[len(ids):], told, cached

    def _reused(self, ids, salt):
        """Copy the longest kept prefix, in whole blocks, and leave at least one token to compute."""
        mine = [(self._common(ids, seen), seen, cache) for whose, seen, cache in self.kept if whose == salt]
        common, _, longest = max(mine, key=lambda each: each[0], default=(0, [], None))
        usable = min(common, len(ids) - 1) // self.block * self.block if self.block else 0
        if not usable:
            return 0, DynamicCache(config=self.model.config)
        cache = copy.deepcopy(longest)
        cache.crop(usable - cache.get_seq_length())
        # Where a fault puts them there, the last block has another conversation's keys and values.
        boundary = self.fault == "wrong block at a boundary" and common == usable
        leak = self.fault == "leak between conversations" and self.flying > 1
        others = [other for _, seen, other in mine if other is not longest and len(seen) >= usable]
        if (boundary or leak) and others:
            block = (..., slice(usable - self.block, usable), slice(None))
            for layer, other in zip(cache.layers, others[-1].layers, strict=True):
                layer.keys[block], layer.values[block] = other.keys[block], other.values[block]
        return usable, cache

    def _common(self, ids, seen):
        same = caches.shared_length(ids, seen)
        # A key made from the first block alone: what follows is taken for the same.
        return min(len(ids), len(seen)) if self.fault == "stale prefix" and same >= self.block else same


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(200, {"data": [{"id": "ours"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append({"path": self.path, "headers": dict(self.headers), **asked})
        if not self.server.before(self, len(self.server.seen)):
            return
        engine = self.server.engine
        written, told, cached = engine.answer(asked["prompt"], asked["max_tokens"], asked.get("cache_salt"))
        decode = engine.tokenizer.decode
        top = [{decode([int(i)]): float(one[i]) for i in one.topk(5).indices} for one in told]
        logprobs = {
            "tokens": [decode([i]) for i in written], "top_logprobs": top,
            "token_logprobs": [float(one[i]) for one, i in zip(told, written, strict=True)],
        }
        usage = {"prompt_tokens": len(engine.tokenizer.encode(asked["prompt"]))}
        if self.server.reports:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        self._send(200, {"choices": [{"text": decode(written), "logprobs": logprobs}], "usage": usage})

    def _send(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(engine, before=lambda handler, count: True, reports=True):
    """Serve an engine on this machine; `before` may answer a request itself and return False."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.engine, server.before, server.reports, server.seen = engine, before, reports, []
        server.address = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
