"""What the experiments on bug or rounding share: every model in every dtype on the same texts, a unit of rows for each."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvbook import lengths, progress
from kvbook.diagnosis import probe
from kvbook.measuring import full_and_split
from kvbook.measuring.in_fp64 import widened
from kvbook.models import corpus, kept, loading, placement
from kvbook.runs import records
from kvreport.chapters.blog_past import past_tables
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings

# Gives the rows of one model in one dtype, and gets texts that are the same in all dtypes.
RowsOf = Callable[[loading.Loaded, list[corpus.Sample]], Iterator[dict[str, Any]]]


def identities(settings: BugOrRoundingSettings, names: Iterable[str]) -> list[dict[str, Any]]:
    """Name the models of a run and refuse what cannot be run; a family without a stand-in that ships gets random weights."""
    placement.check(settings.device, settings.dtypes)
    found = []
    for name in dict.fromkeys(names):
        model = loading.identify(name, past_tables.weights_for(settings, name), settings.seed)
        # One symptom feeds the text a second time.
        loading.check_length(model, 2 * lengths.longest(settings.n_tokens))
        found.append(model | {"asked_for": name})
    _texts(settings, [model["asked_for"] for model in found])
    return found


def _texts(settings: BugOrRoundingSettings, names: list[str]) -> dict[str, list[corpus.Sample]]:
    """Cut the texts of every model; those of tokenizers that do the same once, for encoding the corpus takes its time."""
    by_tokenizer: dict[str, list[corpus.Sample]] = {}
    found = {}
    for name in names:
        tokenizer = loading.tokenizer(name, past_tables.weights_for(settings, name))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        key = backend.to_str() + str(tokenizer("x")["input_ids"]) if backend else name
        if key not in by_tokenizer:
            by_tokenizer[key] = list(
                corpus.samples(settings.corpus, tokenizer, settings.n_samples, settings.n_tokens, settings.seed)
            )
        found[name] = by_tokenizer[key]
    return found


def step(model: PreTrainedModel, ids: torch.Tensor, prefix: Cache) -> full_and_split.LastToken:
    """Feed a text's last token on top of a copy of what all tokens before it have written."""
    past = copy.deepcopy(prefix)
    with widened(model.dtype):
        return probe.last_tokens(model(ids[:, -1:], past_key_values=past, use_cache=True, output_hidden_states=True))[0]


def written(model: PreTrainedModel, ids: torch.Tensor) -> Cache:
    """Write keys and values of all tokens but the last."""
    with widened(model.dtype):
        return model(ids[:, :-1], use_cache=True).past_key_values


def measure(settings: BugOrRoundingSettings, names: Iterable[str], rows_of: RowsOf, writer: records.Writer) -> None:
    """Measure every model in every dtype."""
    names = list(dict.fromkeys(names))
    texts = _texts(settings, names)
    todo = [(name, dtype) for name in names for dtype in settings.dtypes]
    for name, dtype in progress.track(todo, label="full pass against cache: model and dtype"):
        if (unit := f"{name}|{dtype}") in writer.done:
            continue
        weights = past_tables.weights_for(settings, name)
        loaded = kept.load(name, weights=weights, dtype=dtype, device=settings.device, seed=settings.seed)
        about = {"model": loaded.name, "weights": loaded.weights, "dtype": dtype}
        with torch.inference_mode():
            writer.append(unit, [about | row for row in rows_of(loaded, texts[name])])
