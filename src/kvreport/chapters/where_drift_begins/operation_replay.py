"""Equal-input replay of every operation of a model: which ones change a row's bits when fewer rows come with it.

Rows, one a (model, attention, dtype, sample, pass, layer, operation): see ``data/README.md``.  Calls of one operation
within one layer are added up.
"""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from kvbook import lengths
from kvbook.measuring import full_and_split, replay
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.where_drift_begins import FIELDS, WhereDriftBeginsSettings
from kvreport.chapters.where_drift_begins.rows import ALL, PREFILL, REAL, last


def compare(model: PreTrainedModel, ids: torch.Tensor, chunks: Iterable[int]) -> Rows:
    """Replay one text in every way and yield a row for each pass, layer and operation."""
    length = ids.shape[1]
    full, cache = replay.record(model, ids)
    for rows in (*sorted({rows for rows in chunks if rows < length}), length):
        name = ALL if rows == length else last(rows)
        yield from rows_of(name, rows, replay.replay_last(model, ids, full, cache, rows))
    yield from rows_of(PREFILL, length - 1, replay.replay_first(model, ids, full, length - 1))
    prefix = full_and_split.prefill(model, ids[:, :-1])
    yield from rows_of(REAL, 1, replay.replay_last(model, ids, full, prefix, 1, corrected=False))


def rows_of(name: str, rows: int, replayed: list[replay.Replayed]) -> Rows:
    """Add up the calls of each operation within each layer."""
    groups: dict[tuple[int | None, str], list[replay.Replayed]] = {}
    for one in replayed:
        groups.setdefault((one.call.layer, one.call.operation), []).append(one)
    for (layer, operation), calls in groups.items():
        first, differing = calls[0].call, [one.call.order for one in calls if one.differing]
        yield {
            "pass": name, "rows": rows, "layer": layer, "operation": operation, "kind": first.kind,
            "order": first.order, "calls": len(calls), "differing_calls": len(differing),
            "first_differing": min(differing, default=None),
            "inputs_equal": int(all(call.inputs_equal for call in calls)),
            "differing_share": sum(call.differing for call in calls) / sum(call.elements for call in calls),
            "relative_rms": max(call.relative_rms for call in calls),
        }


def inputs(settings: WhereDriftBeginsSettings) -> Inputs:
    """Name the models and the corpus, and refuse what cannot be run."""
    return samples.inputs(settings, (settings.model, *settings.families), settings.n_replayed, settings.n_tokens)


def measure(settings: WhereDriftBeginsSettings, made_of: Inputs, writer: Writer) -> None:
    """Replay every model of the settings."""
    first, *others = (model["asked_for"] for model in made_of["models"])
    # The model's own choice of attention; for the first model transformers' plain one too.
    for name, attention in [(first, None), (first, "eager"), *((name, None) for name in others)]:
        for dtype in settings.dtypes:
            loaded = samples.load(settings, name, dtype, attention)
            implementation = loaded.model.config._attn_implementation
            if name == first and attention is None and implementation == "eager":
                continue  # the model knows no other, and the next case is this one
            case, label = f"{name}|{implementation}|{dtype}", f"replay of {loaded.name}, {implementation}, {dtype}"
            for text in samples.pending(settings, writer, loaded, case, label, n_samples=settings.n_replayed):
                rows = compare(loaded.model, text.ids, settings.chunks)
                text.keep(rows, attention=implementation, n_tokens=len(text.sample.ids))


def work(settings: WhereDriftBeginsSettings) -> Work:
    """Count the passes of each model in each dtype."""
    # Each of the passes is taken apart: what is compared counts about as much as what is computed.
    n_passes = 2 * 2 * (len(settings.chunks) + 4) * settings.n_replayed
    return Work(lengths.middle(settings.n_tokens), n_passes, dtypes=settings.dtypes)


EXPERIMENT = Experiment(
    "operation_replay", WhereDriftBeginsSettings, inputs, measure,
    fields=FIELDS | {"families", "n_replayed", "n_tokens", "chunks"}, work=work,
)
