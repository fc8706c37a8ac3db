"""Write ``data/scores/clean.csv.gz``: log-probabilities of the same tokens by sound ways of computing them.

    python tools/score_rows.py

The real model scores its own recorded answers to the book's sixty questions, sampled at temperature 1: up to 32 tokens
each.  A way is a shape of the same computation: full passes in batches, padded left or right, and cached passes.
``kvbook scores`` must call no pair of them a fault.  Ways that are done lie in ``_build/scores`` and are not repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from transformers import DynamicCache, PreTrainedModel

from kvbook import paths, progress
from kvbook.models import corpus, loading

MODEL, WEIGHTS, N_TOKENS = "smollm2", "package", 32
DTYPES = ("float16",)
TO = paths.DATA / "scores" / "clean.csv.gz"


@dataclass(frozen=True)
class Text:
    """A prompt and what follows it, which is scored."""

    ids: list[int]
    n_prompt: int


@dataclass(frozen=True)
class Way:
    """How texts are scored: in batches, padded to the left or right, and with a cache where `chunk` says so."""

    batch: int = 1
    left: bool = False
    chunk: int | None = None


# Those whose name begins with "full" reuse no state.
WAYS = {
    "full, alone": Way(), "full, 8 padded left": Way(8, left=True),
    "cache, chunks of 16 in batches of 4": Way(4, left=True, chunk=16), "full, 20 padded right": Way(20),
    "cache, chunks of 4, alone": Way(chunk=4),
}

Processed = Callable[[torch.Tensor], torch.Tensor]
Logits = Callable[[PreTrainedModel, dict[str, torch.Tensor]], torch.Tensor]


def plain(logits: torch.Tensor) -> torch.Tensor:
    """Take the log-softmax in fp32."""
    return logits.float().log_softmax(-1)


def answers(tokenizer, n_tokens: int = N_TOKENS) -> list[Text]:
    """Return each question in the chat template with the beginning of the model's answer, its end included."""
    texts = []
    for question, answer in corpus.conversations().items():
        turn = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        said = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        texts.append(Text([*prompt, *said[:n_tokens]], len(prompt)))
    return texts


def called(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of a call."""
    return model(**inputs).logits


def batch_of(texts: list[Text], way: Way) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Pad texts to ids and a mask, and say at which column each begins."""
    width = max(len(text.ids) for text in texts)
    longest = max(text.n_prompt for text in texts)
    starts = [longest - text.n_prompt if way.left else 0 for text in texts]
    width += max(starts)
    ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        ids[row, start : start + len(text.ids)] = torch.tensor(text.ids)
        mask[row, start : start + len(text.ids)] = 1
    return ids, mask, starts


def scored(
    model: PreTrainedModel, texts: list[Text], way: Way, processed: Processed = plain, call: Logits = called
) -> list[np.ndarray]:
    """Return the log-probability of each token after the prompts."""
    found = []
    with torch.inference_mode():
        for first in progress.track(range(0, len(texts), way.batch), label=str(way)):
            some = texts[first : first + way.batch]
            ids, mask, starts = batch_of(some, way)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = _logits(model, ids, mask, positions, max(text.n_prompt for text in some), way.chunk, call)
            for row, (text, start) in enumerate(zip(some, starts, strict=True)):
                begin, end = start + text.n_prompt - 1, start + len(text.ids) - 1
                logprobs = processed(logits[row, begin:end])
                found.append(logprobs.gather(-1, ids[row, begin + 1 : end + 1, None])[:, 0].float().numpy())
    return found


def _logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, n_prompt: int,
    chunk: int | None, call: Logits,
) -> torch.Tensor:
    if chunk is None:
        return call(model, {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False})
    cache, pieces, start = DynamicCache(config=model.config), [], 0
    while start < ids.shape[1]:
        end = start + chunk if start else n_prompt
        pieces.append(call(model, {
            "input_ids": ids[:, start:end], "attention_mask": mask[:, :end], "position_ids": positions[:, start:end],
            "past_key_values": cache, "use_cache": True,
        }))
        start = end
    return torch.cat(pieces, dim=1)


def main() -> None:
    """Score every text by every way in every dtype."""
    kept = paths.BUILD / "scores"
    kept.mkdir(parents=True, exist_ok=True)
    columns = {}
    for dtype in DTYPES:
        loaded = loading.load(MODEL, weights=WEIGHTS, dtype=dtype)
        texts = answers(loaded.tokenizer)
        for name, way in WAYS.items():
            file = kept / f"{dtype}, {name}.npy"
            if not file.exists():
                np.save(file, np.concatenate(scored(loaded.model, texts, way)))
            columns[f"{dtype}: {name}"] = np.load(file)
    about = [(number, place, text.ids[place]) for number, text in enumerate(texts)
             for place in range(text.n_prompt, len(text.ids))]
    table = pd.DataFrame(about, columns=["id", "position", "token"]).assign(**columns)
    # Seven digits are all that fp32 has.
    table.to_csv(TO, index=False, float_format="%.7g", compression={"method": "gzip", "mtime": 0})


if __name__ == "__main__":
    main()
