"""Issue 25420's table: drift of every layer between the full pass and prefix + last token.

Rows, one a (model, dtype, sample, place): see ``data/README.md``.  Places are the hidden states 0 to L and the logits.
"""

import torch
from transformers import PreTrainedModel

from kvbook.measuring import agreement, full_and_split
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.layer_drift import LayerDriftSettings

# What is measured of a place's difference.
_OF_DRIFT = ("max_abs", "rms", "relative_rms", "reference_rms", "differing_share")


def compare(model: PreTrainedModel, ids: torch.Tensor) -> Rows:
    """Score one sample's last token both ways and yield a row for each place."""
    # One copy to the host for all layers: on a GPU each copy waits for everything before it.
    full, split = (
        (one.hidden.cpu(), one.logits.cpu())
        for one in (full_and_split.full_pass(model, ids), full_and_split.split_pass(model, ids))
    )
    hidden, logits = (agreement.drift(one, other) for one, other in zip(full, split, strict=True))
    decision = agreement.decision(full[1], split[1])
    drift = {name: [*getattr(hidden, name).tolist(), getattr(logits, name).item()] for name in _OF_DRIFT}
    said = vars(decision) | {"top1_flip": int(decision.top1_flip)}
    last = len(drift["max_abs"]) - 1
    for layer in range(last + 1):
        of_logits = layer == last
        yield {
            "place": "logits" if of_logits else "hidden", "layer": layer,
            **{name: column[layer] for name, column in drift.items()}, **(said if of_logits else dict.fromkeys(said)),
        }


def inputs(settings: LayerDriftSettings) -> Inputs:
    """Name both models and the corpus, and refuse what cannot be run."""
    return samples.inputs(settings, (settings.model, settings.reference_model), settings.n_samples, settings.n_tokens)


def measure(settings: LayerDriftSettings, made_of: Inputs, writer: Writer) -> None:
    """Score the last token of every text both ways, with both models in every dtype."""
    names = [model["asked_for"] for model in made_of["models"]]
    for loaded, text in samples.each(settings, writer, names, "drift"):
        text.keep(compare(loaded.model, text.ids), start=text.sample.start, n_tokens=len(text.sample.ids))


EXPERIMENT = Experiment("layer_drift", LayerDriftSettings, inputs, measure, work=Work.per_text(passes=2, steps=1))


def _of_other_lengths(settings: LayerDriftSettings) -> LayerDriftSettings | None:
    """Ask for texts of drawn lengths from the first model; None where the main experiment draws its lengths itself."""
    drawn = {"n_tokens": settings.other_lengths, "reference_model": settings.model}
    return settings.model_copy(update=drawn) if settings.other_lengths else None


def _inputs_of_lengths(settings: LayerDriftSettings) -> Inputs | None:
    if (changed := _of_other_lengths(settings)) is None:
        return None
    return inputs(changed) | {"texts": changed.n_samples, "lengths": changed.n_tokens}


LENGTHS = Experiment(
    "layer_drift_lengths", LayerDriftSettings, _inputs_of_lengths,
    lambda settings, made_of, writer: measure(_of_other_lengths(settings), made_of, writer),
    fields=frozenset({"model", "weights", "device", "seed", "corpus", "dtypes", "n_samples", "n_tokens", "memory"}),
    work=lambda settings: EXPERIMENT.work(_of_other_lengths(settings)),
)
