"""Whether the ways write the same text: the document's prompt, greedily, with weights that have learnt something.

Behind the first token that differs two texts go ways of their own, so what is told there is the margin: how close the
second choice was in the way without a cache.  Rows, one a (way, step): see ``data/README.md``.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from kvbook import progress
from kvbook.measuring import caches
from kvbook.models import loading, placement
from kvbook.runs import experiment as frame
from kvbook.runs import records
from kvreport.chapters.static_cache.settings import StaticCacheSettings

WAYS = ("none", "dynamic", "static")


def run(settings: StaticCacheSettings) -> records.Run:
    """Write the texts, or read them if these inputs have been run.

    Raises
    ------
    UserError
        For settings that cannot be run.
    """
    dtypes = dict.fromkeys((settings.dtype, "float32"))
    for dtype in dtypes:
        placement.dtype_on(dtype, placement.device_of(settings.device))
    # Random weights write nothing that a reader could compare.
    weights = "stand-in" if settings.weights == "random" else settings.weights
    model = loading.identify(settings.text_model, weights, settings.seed)
    tokenizer = loading.tokenizer(settings.text_model, weights)
    loading.check_length(model, len(tokenizer(settings.prompt)["input_ids"]) + settings.n_new_tokens)

    def measure(writer: records.Writer) -> None:
        for dtype in dtypes:
            if dtype in writer.done:
                continue
            loaded = loading.load(
                settings.text_model, weights=weights, dtype=dtype, device=settings.device, seed=settings.seed
            )
            ids = loaded.tokenizer(settings.prompt, return_tensors="pt")["input_ids"].to(loaded.model.device)
            about = {"model": loaded.name, "weights": loaded.weights, "dtype": dtype}
            rows = []
            with torch.inference_mode():
                for way in progress.track(WAYS, label=f"texts, {dtype}: way"):
                    written = _write(loaded.model, ids, way, settings.n_new_tokens)
                    rows += [
                        about | {"cache": way, "step": step, "text": loaded.tokenizer.decode(row["token"])} | row
                        for step, row in enumerate(written)
                    ]
            writer.append(dtype, rows)

    return frame.recorded(
        "static_texts",
        __name__,
        settings,
        measure,
        fields={"text_model", "weights", "dtype", "device", "seed", "prompt", "n_new_tokens"},
        models=[model],
    )


def _write(model: PreTrainedModel, ids: torch.Tensor, way: str, n_new: int) -> list[dict[str, Any]]:
    cache = None if way == "none" else caches.make(way, model.config, ids.shape[1] + n_new)
    rows, fed = [], ids
    for _ in range(n_new):
        options = {"use_cache": False} if cache is None else {"past_key_values": cache}
        logits = model(fed, **options).logits[0, -1].float()
        best = logits.topk(2)
        token = best.indices[:1][None]
        rows.append(
            {
                "token": token.item(), "margin": (best.values[0] - best.values[1]).item(),
                "logits_rms": logits.square().mean().sqrt().item(),
            }
        )  # fmt: skip
        fed = torch.cat([fed, token], 1) if cache is None else token
    return rows
