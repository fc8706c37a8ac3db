"""Issue 25420's five mitigations: drift and throughput of each against stock, sample by sample in one run.

Each sample goes through every variant before the next one comes, in an order that rotates, so that a machine whose speed
wanders favours none.  Rows, one a (dtype, sample, variant): see ``data/README.md``.
"""

from typing import Any

import torch

from kvbook import agreement, corpus, mitigations, passes, progress, records, timing
from kvbook.experiments import frame
from kvbook.models import loading, placement
from kvbook.settings import LayerDriftSettings

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
    device = placement.device_of(settings.device)
    for dtype in settings.dtypes:
        placement.dtype_on(dtype, device)
    model = loading.identify(name, settings.weights, settings.seed) | {"asked_for": name}
    loading.check_length(model, settings.n_tokens)
    return frame.recorded(
        __name__,
        settings.model_copy(update={"n_samples": settings.n_mitigation_samples}),
        lambda writer: _measure(settings, model, writer),
        fields={"weights", "device", "seed", "dtypes", "corpus", "n_samples", "n_tokens"},
        models=[model],
        corpus=corpus.describe(settings.corpus),
    )


def _measure(settings: LayerDriftSettings, model: dict[str, Any], writer: records.Writer) -> None:
    for dtype in dtypes(settings):
        loaded = loading.load(
            model["asked_for"], weights=settings.weights, dtype=dtype, device=settings.device, seed=settings.seed
        )
        patches = {name: mitigations.prepare(loaded.model, name) for name in mitigations.NAMES}
        samples = corpus.samples(settings.corpus, loaded.tokenizer, settings.n_mitigation_samples, settings.n_tokens)
        for sample in progress.track(samples, settings.n_mitigation_samples, f"mitigations, {dtype}: sample"):
            unit = f"{dtype}|{sample.index}"
            if unit in writer.done:
                continue
            ids = torch.tensor([sample.ids], device=loaded.model.device)
            with torch.inference_mode():
                if not sample.index:
                    # The first calls of each variant fill allocators and kernel caches.
                    for name in mitigations.NAMES:
                        with mitigations.applied(patches[name]):
                            passes.split_pass(loaded.model, ids)
                turn = sample.index % len(mitigations.NAMES)
                rows = [
                    {"model": loaded.name, "weights": loaded.weights, "dtype": dtype, "sample": sample.index,
                     "source": sample.source, "n_tokens": len(sample.ids), "variant": name}
                    | _compare(loaded, ids, patches[name])
                    for name in mitigations.NAMES[turn:] + mitigations.NAMES[:turn]
                ]  # fmt: skip
            writer.append(unit, rows)


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
