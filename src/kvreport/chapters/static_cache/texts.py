"""Whether the ways write the same text: the document's prompt, greedily, with weights that have learnt something.

Behind the first token that differs two texts go ways of their own, so what is told there is the margin: how close the
second choice was in the way without a cache.  Rows, one a (way, step): see ``data/README.md``.
"""


import torch
from transformers import PreTrainedModel

from kvbook import progress
from kvbook.measuring import caches, choosing
from kvbook.models import kept, loading, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.static_cache import subject
from kvreport.chapters.static_cache.rows import KINDS
from kvreport.chapters.static_cache.settings import FIELDS, StaticCacheSettings


def _weights(settings: StaticCacheSettings) -> str:
    """Choose the weights that write: random ones write nothing that a reader could compare."""
    return "stand-in" if settings.weights == "random" else settings.weights


def _dtypes(settings: StaticCacheSettings) -> tuple[str, ...]:
    return tuple(dict.fromkeys((settings.dtype, "float32")))


def inputs(settings: StaticCacheSettings) -> Inputs:
    """Name the model, and refuse what cannot be run."""
    placement.check(settings.device, _dtypes(settings))
    model = loading.identify(settings.text_model, _weights(settings), settings.seed)
    tokenizer = kept.tokenizer(settings.text_model, _weights(settings))
    loading.check_length(model, len(tokenizer(settings.prompt)["input_ids"]) + settings.n_new_tokens, "n_new_tokens")
    return {"models": [model | {"asked_for": settings.text_model}]}


def measure(settings: StaticCacheSettings, _made_of: Inputs, writer: Writer) -> None:
    """Write the text in every dtype and way."""
    for dtype, _ in writer.pending(dict.fromkeys(_dtypes(settings)), "texts: dtype"):
        loaded = loading.load(
            settings.text_model, weights=_weights(settings), dtype=dtype, device=settings.device, seed=settings.seed
        )
        ids = subject.prompt(settings, loaded)
        writer.keep(dtype, loaded.about, (
            {"cache": way, "step": step, "text": loaded.tokenizer.decode(row["token"])} | row
            for way in progress.track(KINDS, label=f"texts, {dtype}: way")
            for step, row in enumerate(_write(loaded.model, ids, way, settings.n_new_tokens))
        ))


def _write(model: PreTrainedModel, ids: torch.Tensor, way: str, n_new: int) -> Rows:
    cache = None if way == "none" else caches.make(way, model.config, ids.shape[1] + n_new)
    for _, logits, token in choosing.written(model, ids, n_new, cache):
        row = logits[0].float()
        rms = row.square().mean().sqrt().item()
        yield {"token": token.item(), "margin": choosing.margin(row).item(), "logits_rms": rms}


def work(settings: StaticCacheSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_new = settings.n_new_tokens
    return Work(max(1, n_new // 2), n_new, 2 * n_new, _dtypes(settings))


EXPERIMENT = Experiment(
    "static_texts", StaticCacheSettings, inputs, measure,
    fields=FIELDS - {"model"} | {"text_model", "prompt", "n_new_tokens"}, revision=2, work=work,
)
