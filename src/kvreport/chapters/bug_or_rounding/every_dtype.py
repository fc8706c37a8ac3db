"""What the experiments on bug or rounding share: every model in every dtype on the same texts, a unit for each."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvbook import lengths
from kvbook.diagnosis import probe
from kvbook.measuring import full_and_split, in_fp64
from kvbook.models import corpus, kept, loading
from kvbook.runs import Rows, Writer, samples
from kvreport.chapters.blog_past.past_tables import weights_for
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings

# Makes the rows of one model in one dtype; the texts are the same in all dtypes.
RowsOf = Callable[[loading.Loaded, list[corpus.Sample]], Rows]


def identities(settings: BugOrRoundingSettings, names: Iterable[str]) -> list[dict[str, Any]]:
    """Name the models of a run and refuse what cannot be run; where no stand-in ships, weights are random."""
    # One symptom feeds the text a second time.
    models = samples.identities(settings, names, 2 * lengths.longest(settings.n_tokens), weights_for)
    for model in models:
        _texts(settings, model["asked_for"])
    return models


def _texts(settings: BugOrRoundingSettings, name: str) -> list[corpus.Sample]:
    tokenizer = kept.tokenizer(name, weights_for(settings, name))
    return list(corpus.samples(settings.corpus, tokenizer, settings.n_samples, settings.n_tokens, settings.seed))


def step(model: PreTrainedModel, ids: torch.Tensor, prefix: Cache) -> full_and_split.LastToken:
    """Feed a text's last token on top of a copy of what all tokens before it have written."""
    past = copy.deepcopy(prefix)
    with in_fp64.widened(model.dtype):
        return probe.last_tokens(model(ids[:, -1:], past_key_values=past, use_cache=True, output_hidden_states=True))[0]


def written(model: PreTrainedModel, ids: torch.Tensor) -> Cache:
    """Write keys and values of all tokens but the last."""
    with in_fp64.widened(model.dtype):
        return model(ids[:, :-1], use_cache=True).past_key_values


def measure(settings: BugOrRoundingSettings, names: Iterable[str], rows_of: RowsOf, writer: Writer) -> None:
    """Measure every model in every dtype."""
    texts = {name: _texts(settings, name) for name in names}
    units = {f"{name}|{dtype}": (name, dtype) for name in texts for dtype in settings.dtypes}
    for unit, (name, dtype) in writer.pending(units, "full pass against cache: model and dtype"):
        loaded = samples.load(settings, name, dtype, choose=weights_for)
        writer.keep(unit, loaded.about, rows_of(loaded, texts[name]))
