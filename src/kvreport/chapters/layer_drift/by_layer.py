"""Issue 25420's table: drift of every layer between the full pass and prefix + last token.

Rows, one a (model, dtype, sample, place): see ``data/README.md``.  Places are the hidden states 0 to L and the logits.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from kvbook.measuring import agreement
from kvbook.measuring import full_and_split as passes
from kvbook.models import corpus
from kvbook.runs import experiment as frame
from kvbook.runs import records
from kvbook.runs import samples as texts
from kvreport.chapters.layer_drift.settings import LayerDriftSettings


def identities(settings: LayerDriftSettings) -> list[dict[str, Any]]:
    """Name both models, and refuse what cannot be run before anything is: see `texts.identities`."""
    return texts.identities(settings, (settings.model, settings.reference_model), settings.n_tokens)


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
    texts.check_corpus(settings, [model["asked_for"] for model in models], settings.n_samples, settings.n_tokens)
    return frame.recorded(
        "layer_drift",
        __name__,
        settings,
        lambda writer: _measure(settings, models, writer),
        models=models,
        corpus=corpus.describe(settings.corpus),
    )


def _measure(settings: LayerDriftSettings, models: list[dict[str, Any]], writer: records.Writer) -> None:
    for name, dtype in itertools.product([model["asked_for"] for model in models], settings.dtypes):
        loaded = texts.load(settings, name, dtype)
        label = f"drift of {loaded.name}, {dtype}"
        for text in texts.pending(
            settings, writer, loaded, f"{name}|{dtype}", settings.n_samples, settings.n_tokens, label
        ):
            about = text.about | {"start": text.sample.start, "n_tokens": len(text.sample.ids)}
            with torch.inference_mode():
                writer.append(text.unit, [about | row for row in compare(loaded.model, text.ids)])
