"""Write the answers of ``src/kvbook/models/conversations.jsonl``: the trained model's own, to the book's questions.

    python tools/write_conversations.py

Sampled at temperature 1 in float32, one question at a time, for greedily this model soon repeats itself.  An answer
ends where the model ends it.
"""

import json

import torch
import transformers

from kvbook import paths, progress
from kvbook.models import corpus, loading

MODEL, WEIGHTS, DTYPE = "smollm2", "package", "float32"
LONGEST = 256


def main() -> None:
    """Answer every question."""
    loaded = loading.load(MODEL, weights=WEIGHTS, dtype=DTYPE)
    turns = []
    for question in progress.track((paths.DATA / "questions.txt").read_text("utf-8").splitlines(), label="question"):
        prompt = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            transformers.set_seed(len(turns))
            written = loaded.model.generate(**prompt, max_new_tokens=LONGEST, do_sample=True, temperature=1.0, top_k=0)
        answer = loaded.tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        turns.append({"question": question, "answer": answer})
    corpus.CONVERSATIONS.write_text("".join(json.dumps(turn, ensure_ascii=False) + "\n" for turn in turns), "utf-8")


if __name__ == "__main__":
    main()
