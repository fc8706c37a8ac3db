"""Say whether log-probabilities of a rollout and of a trainer differ by rounding or by a fault."""

import sys

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvbook

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
torch.manual_seed(0)
sides = {"rollout": [], "trainer": [], "control": []}

with torch.inference_mode():
    for number, prompt in enumerate(["import os", "def add(a, b):", "for name in", "class Cache:", "x = 1"]):
        given, how = tokenizer(prompt, return_tensors="pt"), {"do_sample": True, "top_k": 0, "max_new_tokens": 8}
        written = model.generate(**given, **how, output_logits=True, return_dict_in_generate=True)
        ids, n = written.sequences, given.input_ids.shape[1]
        logits = {
            "rollout": torch.cat(written.logits),
            "trainer": model(ids, use_cache=False).logits[0, n - 1 : -1],
            # The trainer's computation in another shape.
            "control": model(ids.repeat(4, 1), use_cache=False).logits[0, n - 1 : -1],
        }
        for side in sides:
            scored = logits[side].float().log_softmax(-1).gather(-1, ids[0, n:, None])[:, 0]
            places = range(n, ids.shape[1])
            table = {"id": number, "position": places, "token": ids[0, n:].tolist(), "logprob": scored.tolist()}
            sides[side].append(pd.DataFrame(table))

# For the command: rollout.to_json("rollout.jsonl", orient="records", lines=True, double_precision=12)
rollout, trainer, control = (pd.concat(tables, ignore_index=True) for tables in sides.values())
print("fp32, both sides:", kvbook.check_scores(rollout, trainer, controls=[control]).verdict)
late = rollout.assign(logprob=rollout.groupby("id")["logprob"].shift(-1)).dropna()
found = kvbook.check_scores(late, trainer)
print(f"moved by one position: {found.verdict}, {found.causes[0].name}")
