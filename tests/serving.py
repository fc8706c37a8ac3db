"""A small server of ours with OpenAI's completions, log-probabilities and prefix reuse; faults can be injected.

It runs a model of transformers, or any that the tests build, keeps keys and values of every request, and lets later
ones reuse whole blocks of them.
"""

import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile

import torch
from transformers import DynamicCache

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
                self.arrived.wait_for(lambda: self.flying > 1, 0.3)
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
        # The last token was never fed.
        layers = [(layer.keys[:1].clone(), layer.values[:1].clone()) for layer in cache.layers]
        self.kept.append((salt, seen[:-1], layers))
        return seen[len(ids):], told, cached

    def _reused(self, ids, salt):
        """Copy the longest kept prefix, in whole blocks, and leave at least one token to compute."""
        mine = [(seen, layers) for whose, seen, layers in self.kept if whose == salt]
        cache = DynamicCache(config=self.model.config)
        if not self.block or not mine:
            return 0, cache
        common, layers = max(((self._common(ids, seen), layers) for seen, layers in mine), key=lambda each: each[0])
        usable = min(common, len(ids) - 1) // self.block * self.block
        for index, (keys, values) in enumerate(layers if usable else ()):
            kept = [each[:, :, :usable].clone() for each in (keys, values)]
            for each, other in zip(kept, self._others(mine, layers, index, usable, common), strict=True):
                if other is not None:
                    each[:, :, usable - self.block :] = other[:, :, -self.block :]
            cache.update(*kept, index)
        return usable, cache

    def _common(self, ids, seen):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, seen, strict=False)))
        # A key made from the first block alone: what follows is taken for the same.
        return min(len(ids), len(seen)) if self.fault == "stale prefix" and same >= self.block else same

    def _others(self, mine, layers, index, usable, common):
        """Return another conversation's keys and values for the last block, where a fault puts them there."""
        boundary = self.fault == "wrong block at a boundary" and common == usable
        leak = self.fault == "leak between conversations" and self.flying > 1
        others = [other for seen, other in mine if other is not layers and len(seen) >= usable]
        if not (boundary or leak) or not others:
            return None, None
        return tuple(each[:, :, :usable] for each in others[-1][index])


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
        choice = {"text": decode(written), "logprobs": logprobs}
        self._send(200, {"choices": [choice], "usage": usage})

    def _send(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(engine, before=lambda handler, count: True, reports=True):
    """Serve an engine on this machine; `before` may answer a request itself and return False."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.engine, server.before, server.reports, server.seen = engine, before, reports, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        server.address = f"http://127.0.0.1:{server.server_port}/v1"
        yield server
    finally:
        server.shutdown()
        server.server_close()
