"""Batches of texts of unequal length: pad on the left, pass the mask, and let generate() make the positions."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
texts = ["The capital of France is", "Water boils at a temperature of one hundred", "One, two, three,"]

batch = tokenizer(texts, return_tensors="pt", padding=True)
together = model.generate(**batch, max_new_tokens=8, do_sample=False)
everything = torch.ones_like(batch.input_ids)
without_mask = model.generate(batch.input_ids, attention_mask=everything, max_new_tokens=8, do_sample=False)

alone = [model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, do_sample=False) for text in texts]
for name, tokens in (("with the mask", together), ("without it", without_mask)):
    equal = [torch.equal(row[-8:], one[0, -8:]) for row, one in zip(tokens, alone, strict=True)]
    print(f"{name}: every text continues as it does alone: {all(equal)}")
