"""Issue 25420's five mitigations: drift and throughput of each against stock, sample by sample in one run.

Each sample goes through every variant before the next one comes, in an order that rotates, so that a machine whose
speed wanders favours none.  Rows, one a (dtype, sample, variant): see ``data/README.md``.
"""


import torch

from kvbook import lengths
from kvbook.measuring import agreement, full_and_split, mitigations, timing
from kvbook.models import loading
from kvbook.runs import Experiment, Inputs, Row, Work, Writer, samples
from kvreport.chapters.layer_drift import LayerDriftSettings

# Where 32 bits are already used, upcasting to 32 bits does nothing.
SIXTEEN_BITS = ("float16", "bfloat16")


def subject(settings: LayerDriftSettings) -> str | None:
    """Choose the model whose modules the switches fit: the first one of the two, or None."""
    for name in (settings.model, settings.reference_model):
        model = loading.identify(name, samples.weights_of(settings, name), settings.seed)
        if mitigations.supported(model["architecture"]):
            return name
    return None


def dtypes(settings: LayerDriftSettings) -> list[str]:
    """List the dtypes of the settings in which an upcast changes anything."""
    return [dtype for dtype in settings.dtypes if dtype in SIXTEEN_BITS]


def inputs(settings: LayerDriftSettings) -> Inputs | None:
    """Name the model and the corpus; None without a model of Llama's classes or a 16-bit dtype, or in little memory.

    A mitigation copies weights, and what it costs does not show where a pass waits for its weights.
    """
    name, count = subject(settings), settings.n_mitigation_samples
    if name is None or not dtypes(settings) or settings.memory is not None:
        return None
    return samples.inputs(settings, [name], count, settings.n_tokens) | {"n_samples": count}


def measure(settings: LayerDriftSettings, made_of: Inputs, writer: Writer) -> None:
    """Score every sample under every variant."""
    (name,) = (model["asked_for"] for model in made_of["models"])
    count, variants = made_of["n_samples"], mitigations.NAMES
    for dtype in dtypes(settings):
        loaded = samples.load(settings, name, dtype)
        patches = {variant: mitigations.prepare(loaded.model, variant) for variant in variants}
        for text in samples.pending(settings, writer, loaded, dtype, f"mitigations, {dtype}", n_samples=count):
            with torch.inference_mode():
                if not text.sample.index:
                    # The first calls of each variant fill allocators and kernel caches.
                    for variant in variants:
                        with mitigations.applied(patches[variant]):
                            full_and_split.split_pass(loaded.model, text.ids)
            turn = text.sample.index % len(variants)
            ordered = variants[turn:] + variants[:turn]
            rows = ({"variant": variant} | _compare(loaded, text.ids, patches[variant]) for variant in ordered)
            text.keep(rows, n_tokens=len(text.sample.ids))


def _compare(loaded: loading.Loaded, ids: torch.Tensor, patches: list[mitigations.Patch]) -> Row:
    model = loaded.model
    with mitigations.applied(patches):
        full, full_s = timing.timed(lambda: full_and_split.full_pass(model, ids), model.device)
        cache = full_and_split.prefill(model, ids[:, :-1])
        split, decode_s = timing.timed(lambda: full_and_split.decode(model, ids[:, -1:], cache), model.device)
    drift = agreement.drift(full.logits.cpu(), split.logits.cpu())
    # The last layer's output is seen through the final norm; the one before it is the residual stream itself.
    stream = agreement.drift(full.hidden[-2].cpu(), split.hidden[-2].cpu())
    return {
        "logits_max_abs": drift.max_abs.item(), "logits_relative_rms": drift.relative_rms.item(),
        "stream_relative_rms": stream.relative_rms.item(), "full_s": full_s, "decode_s": decode_s,
    }


def work(settings: LayerDriftSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_variants = len(mitigations.NAMES) * (settings.n_mitigation_samples + 1)
    # The upcast copies of all variants are held together.
    return Work(lengths.middle(settings.n_tokens), 2 * n_variants, n_variants, tuple(dtypes(settings)), copies=4)


EXPERIMENT = Experiment(
    "mitigations", LayerDriftSettings, inputs, measure,
    fields=frozenset({"weights", "device", "seed", "dtypes", "corpus", "n_tokens"}), timed=True, work=work,
)
