"""Issue 25420's table: drift of every layer between the full pass and prefix + last token.

Rows, one a (model, dtype, sample, place): see ``data/README.md``.  Places are the hidden states 0 to L and the logits.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kvbook import agreement, corpus, passes, progress, records
from kvbook.experiments import frame
from kvbook.models import loading, placement
from kvbook.settings import LayerDriftSettings


def identities(settings: LayerDriftSettings) -> list[dict[str, Any]]:
    """Name the models of a run, each once, and refuse what cannot be run before anything is.

    Raises
    ------
    UserError
        For a model that is not there, a device or dtype that is not there, a context shorter than the samples.
    """
    device = placement.device_of(settings.device)
    for dtype in settings.dtypes:
        placement.dtype_on(dtype, device)
    names = dict.fromkeys((settings.model, settings.reference_model))
    models = [loading.identify(name, settings.weights, settings.seed) for name in names]
    for name, model in zip(names, models, strict=True):
        loading.check_length(model, settings.n_tokens)
        model["asked_for"] = name
    return models


def compare(model: passes.PreTrainedModel, ids: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Score one sample's last token both ways and yield a row for each place.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    ids : Tensor of int64, shape (1, seq_len)
        The sample.
    """
    full, split = passes.full_pass(model, ids), passes.split_pass(model, ids)
    yield from rows_of(full, split)


def rows_of(full: passes.LastToken, split: passes.LastToken) -> Iterator[dict[str, Any]]:
    """Turn two computations of a token into rows.

    Parameters
    ----------
    full, split : LastToken
        The reference, and what is compared with it.
    """
    # One copy to the host for all layers: on a GPU each copy waits for everything before it.
    hidden = agreement.drift(full.hidden.cpu(), split.hidden.cpu())
    logits = agreement.drift(full.logits.cpu(), split.logits.cpu())
    decision = agreement.decision(full.logits.cpu(), split.logits.cpu())
    columns = [
        torch.cat([of_hidden, of_logits[None]]).tolist()
        for of_hidden, of_logits in (
            (hidden.max_abs, logits.max_abs),
            (hidden.rms, logits.rms),
            (hidden.relative_rms, logits.relative_rms),
            (hidden.reference_rms, logits.reference_rms),
            (hidden.differing_share, logits.differing_share),
        )
    ]
    last = len(columns[0]) - 1
    for layer, (max_abs, rms, relative_rms, reference_rms, differing_share) in enumerate(zip(*columns, strict=True)):
        is_logits = layer == last
        yield {
            "place": "logits" if is_logits else "hidden",
            "layer": layer,
            "max_abs": max_abs,
            "rms": rms,
            "relative_rms": relative_rms,
            "reference_rms": reference_rms,
            "differing_share": differing_share,
            "kl_nats": decision.kl_nats if is_logits else None,
            "top1_flip": int(decision.top1_flip) if is_logits else None,
            "margin": decision.margin if is_logits else None,
        }


def run(settings: LayerDriftSettings) -> records.Run:
    """Measure the table, or read it if these inputs have been measured.

    Parameters
    ----------
    settings : LayerDriftSettings
        What to run.

    Raises
    ------
    UserError
        For settings that cannot be run; nothing is left behind.
    """
    models = identities(settings)
    # The corpus is cut before a folder is made, so that one which is too small leaves none.
    for model in models:
        for _ in corpus.samples(settings.corpus, loading.tokenizer(model["asked_for"], settings.weights),
                                settings.n_samples, settings.n_tokens):  # fmt: skip
            pass
    return frame.recorded(
        __name__,
        settings,
        lambda writer: _measure(settings, models, writer),
        models=models,
        corpus=corpus.describe(settings.corpus),
    )


def _measure(settings: LayerDriftSettings, models: list[dict[str, Any]], writer: records.Writer) -> None:
    for model in models:
        for dtype in settings.dtypes:
            loaded = loading.load(
                model["asked_for"], weights=settings.weights, dtype=dtype, device=settings.device, seed=settings.seed
            )
            samples = corpus.samples(settings.corpus, loaded.tokenizer, settings.n_samples, settings.n_tokens)
            label = f"drift of {loaded.name}, {dtype}: sample"
            for sample in progress.track(samples, settings.n_samples, label):
                unit = f"{model['asked_for']}|{dtype}|{sample.index}"
                if unit in writer.done:
                    continue
                ids = torch.tensor([sample.ids], device=loaded.model.device)
                with torch.inference_mode():
                    rows = compare(loaded.model, ids)
                    about = {
                        "model": loaded.name,
                        "weights": loaded.weights,
                        "dtype": dtype,
                        "sample": sample.index,
                        "source": sample.source,
                        "start": sample.start,
                        "n_tokens": len(sample.ids),
                    }
                    writer.append(unit, [about | row for row in rows])
