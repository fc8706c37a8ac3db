"""Issue 25420's five mitigations: drift and throughput of each against stock, sample by sample in one run.

Each sample goes through every variant before the next one comes, in an order that rotates, so that a machine whose speed
wanders favours none.  Rows, one a (dtype, sample, variant): see ``data/README.md``.
"""

from typing import Any

import torch

from kvbook.measuring import agreement, mitigations, timing
from kvbook.measuring import full_and_split as passes
from kvbook.models import corpus, loading
from kvbook.runs import experiment as frame
from kvbook.runs import records
from kvbook.runs import samples as texts
from kvreport.chapters.layer_drift.settings import LayerDriftSettings

# Where 32 bits are already used, upcasting to 32 bits does nothing.
SIXTEEN_BITS = ("float16", "bfloat16")


def subject(settings: LayerDriftSettings) -> str | None:
    """Choose the model whose modules the switches fit: the first one of the two, or None."""
    for name in dict.fromkeys((settings.model, settings.reference_model)):
        if mitigations.supported(loading.identify(name, settings.weights, settings.seed)["architecture"]):
            return name
    return None


def dtypes(settings: LayerDriftSettings) -> list[str]:
    """List the dtypes of the settings in which an upcast changes anything."""
    return [dtype for dtype in settings.dtypes if dtype in SIXTEEN_BITS]


def run(settings: LayerDriftSettings) -> records.Run | None:
    """Measure every mitigation; None when the settings hold no model of Llama's classes or no 16-bit dtype.

    Raises
    ------
    UserError
        For settings that cannot be run.
    """
    name = subject(settings)
    if name is None or not dtypes(settings):
        return None
    (model,) = texts.identities(settings, [name], settings.n_tokens)
    return frame.recorded(
        "mitigations",
        __name__,
        settings.model_copy(update={"n_samples": settings.n_mitigation_samples}),
        lambda writer: _measure(settings, name, writer),
        fields={"weights", "device", "seed", "dtypes", "corpus", "n_samples", "n_tokens"},
        models=[model],
        corpus=corpus.describe(settings.corpus),
    )


def _measure(settings: LayerDriftSettings, name: str, writer: records.Writer) -> None:
    count, variants = settings.n_mitigation_samples, mitigations.NAMES
    for dtype in dtypes(settings):
        loaded = texts.load(settings, name, dtype)
        patches = {variant: mitigations.prepare(loaded.model, variant) for variant in variants}
        for text in texts.pending(settings, writer, loaded, dtype, count, settings.n_tokens, f"mitigations, {dtype}"):
            with torch.inference_mode():
                if not text.sample.index:
                    # The first calls of each variant fill allocators and kernel caches.
                    for variant in variants:
                        with mitigations.applied(patches[variant]):
                            passes.split_pass(loaded.model, text.ids)
                turn = text.sample.index % len(variants)
                about = text.about | {"n_tokens": len(text.sample.ids)}
                rows = [
                    about | {"variant": variant} | _compare(loaded, text.ids, patches[variant])
                    for variant in variants[turn:] + variants[:turn]
                ]
            writer.append(text.unit, rows)


def _compare(loaded: loading.Loaded, ids: torch.Tensor, patches: list[mitigations.Patch]) -> dict[str, Any]:
    model = loaded.model
    with mitigations.applied(patches):
        full, full_s = timing.timed(lambda: passes.full_pass(model, ids), model.device)
        cache = passes.prefill(model, ids[:, :-1])
        split, decode_s = timing.timed(lambda: passes.decode(model, ids[:, -1:], cache), model.device)
    drift = agreement.drift(full.logits.cpu(), split.logits.cpu())
    # The last layer's output is seen through the final norm; the one before it is the residual stream itself.
    stream = agreement.drift(full.hidden[-2].cpu(), split.hidden[-2].cpu())
    return {
        "logits_max_abs": drift.max_abs.item(),
        "logits_relative_rms": drift.relative_rms.item(),
        "stream_relative_rms": stream.relative_rms.item(),
        "full_s": full_s,
        "decode_s": decode_s,
    }
