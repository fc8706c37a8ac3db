"""Which part of the arithmetic has to be invariant: rungs from stock to all of it, with drift and error of each.

Rows, one a (dtype, sample, rung): see ``data/README.md``.
"""

from contextlib import nullcontext

import torch
from transformers import DynamicCache, PreTrainedModel

from kvbook import exact
from kvbook.exact.verification import fed
from kvbook.measuring import fp64_reference, in_fp64
from kvbook.runs import Experiment, Inputs, Row, Work, Writer, samples
from kvreport.chapters.exact_caches import paths
from kvreport.chapters.exact_caches import rows as named
from kvreport.chapters.exact_caches.settings import ExactCachesSettings

# Attention implementation and invariant parts of every rung; None is torch's own arithmetic.
RUNGS: dict[str, tuple[str | None, tuple[str, ...] | None]] = {
    named.STOCK: (None, None), named.EAGER: ("eager", None), named.ATTENTION: (None, ("attention",)),
    named.PRODUCTS: (None, ("products",)), named.BOTH: (None, ("products", "attention")),
    named.ALL: (None, exact.PARTS),
}


def inputs(settings: ExactCachesSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    return samples.inputs(settings, [settings.model], settings.n_samples, settings.n_tokens)


def measure(settings: ExactCachesSettings, _made_of: Inputs, writer: Writer) -> None:
    """Take every text through all rungs, in every dtype."""
    truth = fp64_reference.Reference(settings.dtypes)
    for dtype in settings.dtypes:
        loaded = {kind: samples.load(settings, settings.model, dtype, kind) for kind in (None, "eager")}
        truth.take(loaded["eager"].model)
        for text in samples.pending(settings, writer, loaded[None], dtype, f"ladder of the arithmetic, {dtype}"):
            ids, index = text.ids, text.sample.index
            with torch.inference_mode(), in_fp64.widened(torch.float64):
                (reference,) = truth.of(index, lambda model, ids=ids: (model(ids, use_cache=False).logits[0],))
            rows = (
                {"rung": name} | _score(loaded[attention].model, parts, ids, reference)
                for name, (attention, parts) in RUNGS.items()
            )
            text.keep(rows, n_tokens=ids.shape[1])


def _score(model: PreTrainedModel, parts: tuple[str, ...] | None, ids: torch.Tensor, reference: torch.Tensor) -> Row:
    with torch.inference_mode(), nullcontext() if parts is None else exact.row_invariant(parts):
        full = model(ids, use_cache=False).logits[0]
        single = fed(model, ids, [1] * ids.shape[1], DynamicCache(config=model.config))
    errors = [(logits.double() - reference).square().mean().sqrt().item() for logits in (full, single)]
    return paths.against(full, single) | {
        "error_rms": errors[0], "step_error_rms": errors[1], "reference_rms": reference.square().mean().sqrt().item(),
    }


def work(settings: ExactCachesSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts, n_tokens = len(RUNGS) * settings.n_samples, settings.n_tokens
    return Work(n_tokens, n_texts, n_tokens * n_texts, settings.dtypes, in_fp64=settings.n_samples, copies=2)


EXPERIMENT = Experiment("exact_ladder", ExactCachesSettings, inputs, measure, paths.FIELDS, work=work)
