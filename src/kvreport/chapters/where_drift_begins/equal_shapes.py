"""The same prompt read with a cache and without, in passes of equal shapes, compared bit for bit.

Issue 25420 says that no bit differs, "as the inputs contain the same values and shapes".  Beside it stands a prefill of
one token fewer, whose shapes are others: what a cached step's cache comes from.  Rows, one a (model, dtype, sample,
shapes, what): see ``data/README.md``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvbook import lengths
from kvbook.measuring import agreement, replay
from kvbook.models import corpus
from kvbook.runs import records, samples
from kvbook.runs.experiment import Experiment
from kvbook.runs.work import Work
from kvreport.chapters.where_drift_begins.rows import EQUAL, FEWER
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings

STATES, KEYS, LOGITS, OPERATIONS = "hidden states", "keys and values", "logits", "operations"


@dataclass(frozen=True)
class Read:
    """A prompt that has been read: every operation of the pass, and what it returned."""

    calls: dict[replay.Key, replay.Call]
    hidden: tuple[torch.Tensor, ...]
    logits: torch.Tensor
    cache: Cache | None

    @property
    def operations(self) -> list[torch.Tensor]:
        """What every operation gave."""
        return [call.output for call in self.calls.values()]

    @property
    def attended(self) -> list[torch.Tensor]:
        """Queries, keys and values as the attention takes them; a pass without a cache has them nowhere else."""
        return [tensor for call in self.calls.values() if call.kind == "attention" for tensor in call.inputs]


def read(model: PreTrainedModel, ids: torch.Tensor, use_cache: bool) -> Read:
    """Read a prompt at once."""
    calls, output = replay.operations_of(model, lambda: model(ids, use_cache=use_cache, output_hidden_states=True))
    return Read(calls, output.hidden_states, output.logits, output.past_key_values)


def compare(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Hold a prompt read with a cache against the same prompt without one, and against one token fewer."""
    without, cached, shorter = read(model, ids, False), read(model, ids, True), read(model, ids[:, :-1], True)
    if without.calls.keys() != cached.calls.keys():
        raise ValueError(f"{type(model).__name__}: another operation runs with a cache than without")
    pairs = {
        (EQUAL, STATES): (without.hidden, cached.hidden),
        (EQUAL, KEYS): (without.attended, cached.attended),
        (EQUAL, LOGITS): ([without.logits], [cached.logits]),
        (EQUAL, OPERATIONS): (without.operations, cached.operations),
        (FEWER, STATES): ([state[:, :-1] for state in without.hidden], shorter.hidden),
        (FEWER, KEYS): ([states[..., :-1, :] for states in held(cached.cache)], held(shorter.cache)),
    }
    for (shapes, what), (reference, found) in pairs.items():
        yield {"shapes": shapes, "what": what, "elements": sum(t.numel() for t in found)} | {
            "differing": differing(reference, found)
        }


def held(cache: Cache) -> list[torch.Tensor]:
    """List the keys and values of a cache."""
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


def differing(reference: Iterable[torch.Tensor], found: Iterable[torch.Tensor]) -> int:
    """Count the elements whose bits differ."""
    return sum(int((~agreement.bits_equal(one, other)).sum()) for one, other in zip(reference, found, strict=True))


def inputs(settings: WhereDriftBeginsSettings) -> dict[str, Any]:
    """Name the settings' first model and the corpus, and refuse what cannot be run."""
    models = samples.identities(settings, [settings.model], settings.n_tokens)
    samples.check_corpus(settings, [settings.model], settings.n_samples, settings.n_tokens)
    return {"models": models, "corpus": corpus.describe(settings.corpus)}


def measure(settings: WhereDriftBeginsSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Read every prompt with the settings' first model, in each dtype."""
    for dtype in settings.dtypes:
        loaded = samples.load(settings, settings.model, dtype)
        label = f"prompts of equal shapes, {dtype}"
        for text in samples.pending(settings, writer, loaded, dtype, settings.n_samples, settings.n_tokens, label):
            about = text.about | {"n_tokens": text.ids.shape[1]}
            with torch.inference_mode():
                writer.append(text.unit, [about | row for row in compare(loaded.model, text.ids)])


def work(settings: WhereDriftBeginsSettings) -> Work:
    """Count the passes in each dtype."""
    return Work(lengths.middle(settings.n_tokens), 3 * settings.n_samples, dtypes=settings.dtypes)


EXPERIMENT = Experiment(
    "equal_shapes", WhereDriftBeginsSettings, inputs, measure,
    fields=frozenset({"model", "weights", "device", "seed", "dtypes", "corpus", "n_samples", "n_tokens"}),
    work=work,
)
