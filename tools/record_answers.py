"""Record what an engine answers to `kvbook check`, for tests that replay it without the engine.

    python tools/record_answers.py llama.cpp

writes ``tests/answers/llama.cpp.json.gz``: the first line of the prompts, then every request with its answer, in order.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import ClassVar

from kvbook import paths
from kvbook.server import check, client, prompts
from kvreport.engines import serving

# One length, a whole block: every kind of comparison.
LENGTHS = (32,)
ANSWERS = paths.ROOT / "tests" / "answers"


class Recorder(client.Client):
    """A client that keeps what it is answered; `calls` is set on the class, for clients are copied."""

    calls: ClassVar[list[dict]] = []

    def call(self, method, path, body=None):
        """Send one request, and keep it with its answer."""
        # A model's name may be a path of this machine.
        kept = {"path": path, "body": body and body | {"model": "served"}}
        self.calls.append(kept)
        try:
            reply = super().call(method, path, body)
            kept["reply"] = reply | {"model": "served"}
        except client.Refused as error:
            kept["refused"] = str(error)
            raise
        return reply


def main(name: str) -> Path:
    """Start an engine, check it, and write down what it said."""
    first = prompts.opening()
    prompts.opening = lambda: first
    with serving.serving(name) as server:
        found = check.check(Recorder(server.address, server.timeout, server.model), None, LENGTHS)
    print("\n".join(found.lines))
    file = ANSWERS / f"{name}.json.gz"
    file.parent.mkdir(exist_ok=True)
    said = {"opening": first, "verdict": found.verdict, "why": found.why, "calls": Recorder.calls}
    file.write_bytes(gzip.compress(json.dumps(said, ensure_ascii=False).encode(), mtime=0))
    return file


if __name__ == "__main__":
    print(main(sys.argv[1]))
