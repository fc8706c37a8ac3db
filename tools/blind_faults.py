"""Twenty faults of caches that no test and no injected fault of the library is like, on twenty architectures.

The list was committed before the first was judged.

Two slips of this program were mended after that: MPT was called without a cache, as its configuration has it, and
GPT-NeoX's fault struck a slot that a short cache lacks.  One name was corrected, of keys cut to 8 bits.

`python tools/blind_faults.py` judges each by `kvbook check`'s rule in fp32 and bf16 together, and prints a row for
each.  ``data/check/blind_faults.csv`` has its rows of transformers 5.23.
"""

import csv
import sys
from collections.abc import Callable
from unittest.mock import patch

import pandas as pd
import torch
from transformers import Cache

from kvbook.atlas import configurations
from kvbook.diagnosis.rows import by_way, rows_of, worst
from kvbook.measuring import in_fp64
from kvbook.models import corpus

# Given keys or values as attention gets them, shape (texts, heads, tokens, width), and how many were held before.
Change = Callable[[torch.Tensor, int], torch.Tensor]
_TEXTS = [corpus.Sample(index, "random", 0, configurations.text(20, seed=index)[0].tolist()) for index in range(2)]


def _set(tensor: torch.Tensor, place: tuple, value: torch.Tensor | float) -> torch.Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


EVERY = slice(None)
# Architecture, what is wrong, which of keys ("k") and values ("v") it strikes, in which layers, and how.
FAULTS: tuple[tuple[str, str, str, tuple[int, ...], Change], ...] = (
    ("llama", "one head of keys is zero", "k", (2,), lambda x, _: _set(x, (EVERY, 0), 0.0)),
    ("gpt2", "heads of values are rotated by one", "v", (1,), lambda x, _: x.roll(1, 1)),
    ("mistral", "keys are scaled twice", "k", (0, 1, 2, 3), lambda x, _: x * x.shape[-1] ** -0.5),
    ("qwen2", "the first token's key is the second's", "k", (0,), lambda x, _: _set(x, (EVERY, EVERY, 0), x[:, :, 1])),
    ("qwen3", "old keys fade by 2 % in the last layer", "k", (3,),
     lambda x, held: torch.cat([x[:, :, :held] * 0.98, x[:, :, held:]], 2)),
    ("falcon", "new values are written in front", "v", (0, 1, 2, 3),
     lambda x, held: torch.cat([x[:, :, held:], x[:, :, :held]], 2)),
    ("mpt", "every eighth slot is overwritten by its neighbour", "v", (1,),
     lambda x, _: _set(x, (EVERY, EVERY, slice(7, None, 8)), x[:, :, 6::8][:, :, : x[:, :, 7::8].shape[2]])),
    ("phi", "the oldest token is forgotten", "v", (0, 1, 2, 3), lambda x, _: _set(x, (EVERY, EVERY, 0), 0.0)),
    ("phi3", "values are clipped at one standard deviation", "v", (2,),
     lambda x, _: x.clamp(-x.std().item(), x.std().item())),
    ("gemma", "the halves of keys are swapped", "k", (0,), lambda x, _: x.roll(x.shape[-1] // 2, -1)),
    ("gpt_neox", "one number of the cache has the other sign", "k", (1,),
     lambda x, _: _set(x, (0, 0, 1, 0), -x[0, 0, 1, 0])),
    ("opt", "each value is the mean of it and the one before", "v", (3,),
     lambda x, _: (x + torch.cat([x[:, :, :1], x[:, :, :-1]], 2)) / 2),
    ("bloom", "all but the last four keys have no sign", "k", (2,),
     lambda x, _: torch.cat([x[:, :, :-4].abs(), x[:, :, -4:]], 2)),
    ("stablelm", "the second text's cache is the first's", "v", (0, 1, 2, 3), lambda x, _: x[:1].expand_as(x)),
    ("olmo2", "the last channel is lost", "v", (0, 1, 2, 3), lambda x, _: _set(x, (..., -1), 0.0)),
    ("starcoder2", "tokens are in reverse order within the last four", "k", (0,),
     lambda x, held: torch.cat([x[:, :, : held - 4], x[:, :, held - 4 : held].flip(2), x[:, :, held:]], 2)
     if held > 4 else x),
    ("cohere", "noise of 1 % enters with every read", "v", (1,),
     lambda x, _: x * (1 + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.shape[2])))),
    ("mixtral", "new keys are cut to 8 bits (e5m2)", "k", (0, 1, 2, 3),
     lambda x, held: torch.cat([x[:, :, :held], x[:, :, held:].to(torch.float8_e5m2).to(x.dtype)], 2)),
    ("granite", "keys of the last two tokens are exchanged", "k", (1,),
     lambda x, _: torch.cat([x[:, :, :-2], x[:, :, -2:].flip(2)], 2)),
    ("gemma2", "old values are those of a model with weights 1 % larger", "v", (0,),
     lambda x, held: torch.cat([x[:, :, :held] * 1.01, x[:, :, held:]], 2)),
)


def judged(architecture: str, strikes: str, layers: tuple[int, ...], change: Change | None) -> tuple[str, str]:
    """Return the verdict on an architecture with a fault, and why."""
    rows = []
    stock = Cache.update

    def update(cache, keys, values, layer, *given, **named):
        held = cache.get_seq_length(layer)
        found = stock(cache, keys, values, layer, *given, **named)
        if not held or layer not in layers or change is None:
            return found
        pair = dict(zip("kv", found, strict=True))
        pair[strikes] = change(pair[strikes], held).to(pair[strikes].dtype)
        return pair["k"], pair["v"]

    with patch.object(Cache, "update", update):
        for dtype in ("float32", "bfloat16"):
            model = configurations.build(architecture, getattr(torch, dtype))
            in_fp64.experts_one_by_one(model)
            rows += rows_of(model, dtype, _TEXTS, together=2, use_cache=True)
    finding = worst(by_way(pd.DataFrame(rows), 0))[1]
    return finding.kind, finding.why


def main() -> None:
    """Judge all, each architecture without its fault too."""
    out = csv.writer(sys.stdout)
    out.writerow(["architecture", "fault", "verdict", "why", "without_it"])
    for architecture, fault, strikes, layers, change in FAULTS:
        sound, _ = judged(architecture, strikes, layers, None)
        out.writerow([architecture, fault, *judged(architecture, strikes, layers, change), sound])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
