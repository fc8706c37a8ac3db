"""Runs in the environment of OpenVINO GenAI, without this book: its package has no server, so this is a small one.

It takes OpenAI's completions, of one prompt as text or token ids.  Requests with ``"cache_prompt": false`` go to a
second pipeline, which has no prefix cache.  Requests that come while others run are computed together.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino
import openvino_genai

# The processor's plugin rounds activations and cache to 8 bits unless it is told not to.
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


class Pipeline:
    """A pipeline that one thread steps while there are requests."""

    def __init__(self, asked: dict[str, Any], reuses: bool) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = 1, reuses
        options = _EXACT | {"INFERENCE_NUM_THREADS": 1}
        if asked["mode"] == "quantized cache":
            options["KV_CACHE_PRECISION"] = "u8"
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(asked["model"], scheduler, "CPU", options)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.changed, self.count = threading.Condition(), 0
        threading.Thread(target=self._steps, daemon=True).start()

    def _steps(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(self.pipeline.has_non_finished_requests)
                self.pipeline.step()
                self.changed.notify_all()

    def answer(self, ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """Continue a prompt greedily."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.logprobs, config.do_sample = tokens, 1, False
        config.set_eos_token_id(self.tokenizer.get_eos_token_id())
        with self.changed:
            self.count += 1
            prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
            handle = self.pipeline.add_request(self.count, prompt, config)
            self.changed.notify_all()
            self.changed.wait_for(lambda: "FINISHED" in str(handle.get_status()))
            (found,) = handle.read_all()
        return list(found.generated_ids), list(found.generated_log_probs)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send({"data": [{"id": "openvino"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pipeline = self.server.pipelines[asked.get("cache_prompt", True)]
        prompt, tokenizer = asked["prompt"], pipeline.tokenizer
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, add_special_tokens=False).input_ids.data[0].tolist()
        written, told = pipeline.answer(prompt, asked["max_tokens"])
        texts = [tokenizer.decode([token]) for token in written]
        content = [
            {"id": token, "token": text, "logprob": value, "top_logprobs": []}
            for token, text, value in zip(written, texts, told, strict=True)
        ]
        choice = {"text": tokenizer.decode(written), "logprobs": {"content": content}}
        self._send({"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(written)}})

    def _send(self, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def main() -> None:
    """Serve what the one argument asks for."""
    asked = json.loads(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", asked["port"]), _Handler)
    server.pipelines = {reuses: Pipeline(asked, reuses) for reuses in (False, True)}
    server.serve_forever()


if __name__ == "__main__":
    main()
