"""Runs in the environment of vLLM, without this book: samples texts and scores them once more as prompts.

Reads one JSON object from the standard input and writes a list for each group of prompts to the file that it names.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    """Answer the one request."""
    asked = json.load(sys.stdin)
    llm = LLM(asked["model"], dtype=asked["dtype"], seed=asked["seed"], enforce_eager=True, max_model_len=asked["room"])
    Path(asked["to"]).write_text(json.dumps([_batch(llm, asked, group) for group in asked["groups"]]))


def _batch(llm: LLM, asked: dict[str, Any], group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # A prompt draws by a seed of its own: with one for all, texts would not be independent.
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=asked["new_tokens"], logprobs=0,
            seed=asked["seed"] * 1_000_003 + prompt["index"])
        for prompt in group
    ]
    prompts = [prompt["ids"] for prompt in group]
    written = [each.outputs[0] for each in llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)]
    texts = [[*ids, *one.token_ids] for ids, one in zip(prompts, written, strict=True)]
    llm.reset_prefix_cache()
    once = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    again = llm.generate([{"prompt_token_ids": ids} for ids in texts], once)
    found = []
    for prompt, text, one, scored in zip(prompts, texts, written, again, strict=True):
        sampled = [place[token].logprob for token, place in zip(one.token_ids, one.logprobs, strict=True)]
        read = [scored.prompt_logprobs[place][text[place]].logprob for place in range(len(prompt), len(text))]
        found.append({"tokens": list(one.token_ids), "sampled": sampled, "read": read})
    return found


# vLLM starts a process that imports this file again.
if __name__ == "__main__":
    main()
