"""Drift after every layer, of a clean model and of one with a bug in a single layer.

Rows, one a (dtype, bug, text, layer): see ``data/README.md``.
"""

from contextlib import nullcontext

import torch

from kvbook.diagnosis import faults, probe
from kvbook.models import corpus, loading
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.bug_or_rounding import every_dtype
from kvreport.chapters.bug_or_rounding.rows import CLEAN, LATE, NARROW
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings

_INJECT = {LATE: faults.one_step_late, NARROW: faults.kept_in_16_bits}


def inputs(settings: BugOrRoundingSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    return {"models": every_dtype.identities(settings, [settings.model]), "corpus": corpus.describe(settings.corpus)}


def _rows_of(loaded: loading.Loaded, texts: list[corpus.Sample]) -> Rows:
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


def measure(settings: BugOrRoundingSettings, _made_of: Inputs, writer: Writer) -> None:
    """Measure the first model, clean and with each bug."""
    every_dtype.measure(settings, [settings.model], _rows_of, writer)


EXPERIMENT = Experiment(
    "first_bad_layer", BugOrRoundingSettings, inputs, measure, work=Work.per_text(passes=2, steps=1 + len(_INJECT))
)
