"""Two implementations of one model: a tolerance from the dtype, and fp64 to tell rounding from a bug."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
ids = tokenizer("The capital of France is Paris, and that of Italy is", return_tensors="pt").input_ids


def difference(dtype: torch.dtype, harm: float = 0) -> float:
    """Compare two attention kernels: root mean square difference of the logits over their spread, in roundoffs."""
    # The grouped product of experts, where a model has some, lacks fp64.
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, experts_implementation="eager").eval()
    with torch.inference_mode():
        one = model(ids).logits[0, -1].double()
        model.lm_head.weight[0] += harm
        with sdpa_kernel(SDPBackend.MATH):
            other = model(ids).logits[0, -1].double()
    return ((one - other).square().mean().sqrt() / one.std() / (torch.finfo(dtype).eps / 2)).item()


for dtype in (torch.float32, torch.float64):
    sound, wrong = difference(dtype), difference(dtype, harm=0.01)
    print(f"{dtype}: within 1,000 roundoffs: {sound < 1000}; with one wrong row of weights: {wrong < 1000}")
