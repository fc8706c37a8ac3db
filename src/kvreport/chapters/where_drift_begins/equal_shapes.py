"""The same prompt read with a cache and without, in passes of equal shapes, compared bit for bit.

Issue 25420 says that no bit differs, "as the inputs contain the same values and shapes".  Beside it stands a prefill of
one token fewer, whose shapes are others: what a cached step's cache comes from.  Rows, one a (model, dtype, sample,
shapes, what): see ``data/README.md``.
"""

from typing import NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from kvbook.measuring import agreement, replay
from kvbook.measuring.full_and_split import states_of
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.where_drift_begins import FIELDS, WhereDriftBeginsSettings
from kvreport.chapters.where_drift_begins.rows import EQUAL, FEWER

STATES, KEYS, LOGITS, OPERATIONS = "hidden states", "keys and values", "logits", "operations"


class Read(NamedTuple):
    """A prompt that has been read: the names of all operations of the pass, and what is compared of it."""

    operations: set[replay.Key]
    compared: dict[str, list[torch.Tensor]]
    cache: Cache | None


def read(model: PreTrainedModel, ids: torch.Tensor, use_cache: bool) -> Read:
    """Read a prompt at once."""
    calls, output = replay.operations_of(model, lambda: model(ids, use_cache=use_cache, output_hidden_states=True))
    compared = {
        STATES: list(output.hidden_states),
        # As the attention takes them, with queries; a pass without a cache has them nowhere else.
        KEYS: [tensor for call in calls.values() if call.kind == "attention" for tensor in call.inputs],
        LOGITS: [output.logits], OPERATIONS: [call.output for call in calls.values()],
    }
    return Read(set(calls), compared, output.past_key_values)


def compare(model: PreTrainedModel, ids: torch.Tensor) -> Rows:
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


def inputs(settings: WhereDriftBeginsSettings) -> Inputs:
    """Name the settings' first model and the corpus, and refuse what cannot be run."""
    return samples.inputs(settings, [settings.model], settings.n_samples, settings.n_tokens)


def measure(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Read every prompt with the settings' first model, in each dtype."""
    for loaded, text in samples.each(settings, writer, [settings.model], "prompts of equal shapes"):
        text.keep(compare(loaded.model, text.ids), n_tokens=text.ids.shape[1])


EXPERIMENT = Experiment(
    "equal_shapes", WhereDriftBeginsSettings, inputs, measure, fields=FIELDS | {"n_samples", "n_tokens"},
    work=Work.per_text(passes=3),
)
