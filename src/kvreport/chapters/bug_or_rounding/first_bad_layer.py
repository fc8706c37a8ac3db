"""Drift after every layer, of a clean model and of one with a bug in a single layer.

Rows, one a (dtype, bug, text, layer): see ``data/README.md``.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from kvbook import lengths
from kvbook.diagnosis import faults, probe
from kvbook.models import corpus, loading
from kvbook.runs import records
from kvbook.runs.experiment import Experiment, Work
from kvreport.chapters.bug_or_rounding import every_dtype
from kvreport.chapters.bug_or_rounding.rows import CLEAN, LATE, NARROW
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings

_INJECT = {LATE: faults.one_step_late, NARROW: faults.kept_in_16_bits}


def inputs(settings: BugOrRoundingSettings) -> dict[str, Any]:
    """Name the model and the corpus, and refuse what cannot be run."""
    return {"models": every_dtype.identities(settings, [settings.model]), "corpus": corpus.describe(settings.corpus)}


def _rows_of(loaded: loading.Loaded, texts: list[corpus.Sample]) -> Iterator[dict[str, Any]]:
    # The middle layer gets the bug; rows count from 1, for 0 is the embedding.
    model, index = loaded.model, loaded.model.config.num_hidden_layers // 2
    for text in texts:
        ids = torch.tensor([text.ids], device=model.device)
        # No bug changes the pass that fills the cache.
        full, prefix = probe.full_rows(model, ids)[0], every_dtype.written(model, ids)
        for bug in (CLEAN, *_INJECT):
            with _INJECT[bug](model, layers={index}) if bug in _INJECT else nullcontext():
                found = every_dtype.step(model, ids, prefix)
            about = {"bug": bug, "planted_in": index + 1 if bug in _INJECT else None}
            about |= {"sample": text.index, "source": text.source}
            for layer, drift in enumerate(probe.relative(full.hidden, found.hidden).tolist()):
                yield about | {"layer": layer, "drift": drift}


def measure(settings: BugOrRoundingSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Measure the first model, clean and with each bug."""
    every_dtype.measure(settings, [settings.model], _rows_of, writer)


def work(settings: BugOrRoundingSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_steps = (1 + len(_INJECT)) * settings.n_samples
    return Work(lengths.middle(settings.n_tokens), 2 * settings.n_samples, n_steps, settings.dtypes)


EXPERIMENT = Experiment("first_bad_layer", BugOrRoundingSettings, inputs, measure, work=work)
