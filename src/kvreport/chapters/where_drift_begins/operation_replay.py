"""Every operation of a model, watched: which ones change a row's bits when fewer rows come with it, and when none does.

Each operation of a pass is replayed on equal inputs with fewer rows.  Calls of one operation within one layer are added
up.

A second experiment reads the same prompt with a cache and without, in passes of equal shapes, and compares them bit for
bit.  Issue 25420 says that no bit differs, "as the inputs contain the same values and shapes".  Beside it stands a
prefill of one token fewer, whose shapes are others: what a cached step's cache comes from.

Rows, one a (model, attention, dtype, sample, pass, layer, operation), and one a (model, dtype, sample, shapes, what):
see ``data/README.md``.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from kvbook import lengths
from kvbook.measuring import agreement, caches, replay
from kvbook.measuring.full_and_split import states_of
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.where_drift_begins import FIELDS, WhereDriftBeginsSettings
from kvreport.chapters.where_drift_begins.rows import ALL, EQUAL, FEWER, PREFILL, REAL, last

COMPARED = STATES, KEYS, LOGITS, OPERATIONS = "hidden states", "keys and values", "logits", "operations"


def compare(model: PreTrainedModel, ids: torch.Tensor, chunks: Iterable[int]) -> Rows:
    """Replay one text in every way and yield a row for each pass, layer and operation."""
    length = ids.shape[1]
    full, cache = replay.record(model, ids)
    for rows in (*sorted({rows for rows in chunks if rows < length}), length):
        name = ALL if rows == length else last(rows)
        yield from rows_of(name, rows, replay.replay_last(model, ids, full, cache, rows))
    yield from rows_of(PREFILL, length - 1, replay.replay_first(model, ids, full, length - 1))
    _, prefix = replay.record(model, ids[:, :-1])
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
    names = settings.model, *settings.families
    return samples.inputs(settings, names, settings.n_replayed, settings.n_tokens, cut=True)


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


class Read(NamedTuple):
    """A prompt that has been read: the names of all operations of the pass, and what is compared of it."""

    operations: set[replay.Key]
    compared: dict[str, list[torch.Tensor]]
    cache: Cache | None


def read(model: PreTrainedModel, ids: torch.Tensor, use_cache: bool) -> Read:
    """Read a prompt at once."""
    given = {"past_key_values": caches.recording(model.config) if use_cache else None, "use_cache": use_cache}
    calls, output = replay.operations_of(model, lambda: model(ids, output_hidden_states=True, **given))
    compared = {
        STATES: list(output.hidden_states),
        # As the attention takes them, with queries; a pass without a cache has them nowhere else.
        KEYS: [tensor for call in calls.values() if call.kind == "attention" for tensor in call.inputs],
        LOGITS: [output.logits], OPERATIONS: [call.output for call in calls.values()],
    }
    return Read(set(calls), compared, output.past_key_values)


def compare_reads(model: PreTrainedModel, ids: torch.Tensor) -> Rows:
    """Compare a prompt read without a cache with the same prompt read with one, and with one token fewer."""
    without, cached, shorter = read(model, ids, False), read(model, ids, True), read(model, ids[:, :-1], True)
    if without.operations != cached.operations:
        raise ValueError(f"{type(model).__name__}: another operation runs with a cache than without")
    pairs = {(EQUAL, what): (tensors, cached.compared[what]) for what, tensors in without.compared.items()} | {
        (FEWER, STATES): ([state[:, :-1] for state in without.compared[STATES]], shorter.compared[STATES]),
        (FEWER, KEYS): ([states[..., :-1, :] for states in states_of(cached.cache)], states_of(shorter.cache)),
    }
    for (shapes, what), (reference, found) in pairs.items():
        both = zip(reference, found, strict=True)
        differing = sum(int((~agreement.bits_equal(one, other)).sum()) for one, other in both)
        elements = sum(tensor.numel() for tensor in found)
        yield {"shapes": shapes, "what": what, "elements": elements, "differing": differing}


def inputs_of_reads(settings: WhereDriftBeginsSettings) -> Inputs:
    """Name the settings' first model and the corpus, and refuse what cannot be run."""
    return samples.inputs(settings, [settings.model], settings.n_samples, settings.n_tokens, cut=True)


def measure_reads(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Read every prompt with the settings' first model, in each dtype."""
    for loaded, text in samples.each(settings, writer, [settings.model], "prompts of equal shapes"):
        text.keep(compare_reads(loaded.model, text.ids), n_tokens=text.ids.shape[1])


READS = Experiment(
    "equal_shapes", WhereDriftBeginsSettings, inputs_of_reads, measure_reads, fields=FIELDS | {"n_samples", "n_tokens"},
    work=Work.per_text(passes=3),
)
