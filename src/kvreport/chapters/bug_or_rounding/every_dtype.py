"""What the experiments on bug or rounding share: every model in every dtype on the same texts, a unit of rows for each.

A measure is asked for the rows of one model in one dtype, and gets texts that are the same in all dtypes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kvbook import progress
from kvbook.models import corpus, loading, placement
from kvbook.runs import experiment as frame
from kvbook.runs import records
from kvreport.chapters.blog_past import past_tables
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings

Measure = Callable[[loading.Loaded, list[corpus.Sample]], Iterator[dict[str, Any]]]
Extra = Callable[[str], Iterator[dict[str, Any]]]


def identities(settings: BugOrRoundingSettings, names: Iterable[str]) -> list[dict[str, Any]]:
    """Name the models of a run and refuse what cannot be run before anything is.

    Parameters
    ----------
    settings : BugOrRoundingSettings
        What to run.
    names : iterable of str
        The models; a family whose stand-in does not ship gets random weights, and the rows say so.

    Raises
    ------
    UserError
        For a model, device or dtype that is not there, or a context that is too short.
    """
    placement.check(settings.device, settings.dtypes)
    found = []
    for name in dict.fromkeys(names):
        model = loading.identify(name, past_tables.weights_for(settings, name), settings.seed)
        # One symptom feeds the text a second time.
        loading.check_length(model, 2 * settings.n_tokens)
        found.append(model | {"asked_for": name})
    return found


def run(
    name: str,
    module: str,
    settings: BugOrRoundingSettings,
    models: list[dict[str, Any]],
    measure: Measure,
    extra: tuple[dict[str, Any], Extra] | None = None,
) -> records.Run:
    """Measure every model in every dtype, or read the rows if these inputs have been measured.

    Parameters
    ----------
    name, module : str
        The experiment's name, and where it is measured.
    settings : BugOrRoundingSettings
        What to run.
    models : list of dict
        From `identities`.
    measure : callable
        Of one model in one dtype.
    extra : tuple of dict and callable, optional
        A model of another kind: its identity, and the rows of one dtype, ``model``, ``weights`` and ``dtype`` included.

    Raises
    ------
    UserError
        For a corpus that is too small; nothing is left behind.
    """
    # Cut before there is a folder, so that a corpus that is too small leaves none.
    texts = _texts(settings, [model["asked_for"] for model in models])
    return frame.recorded(
        name,
        module,
        settings,
        lambda writer: _measure(settings, models, texts, measure, extra, writer),
        models=models + ([extra[0]] if extra else []),
        corpus=corpus.describe(settings.corpus),
    )


def _texts(settings: BugOrRoundingSettings, names: list[str]) -> dict[str, list[corpus.Sample]]:
    """Cut the texts of every model; those of tokenizers that do the same once, for encoding the corpus takes its time."""
    by_tokenizer: dict[str, list[corpus.Sample]] = {}
    found = {}
    for name in names:
        tokenizer = loading.tokenizer(name, past_tables.weights_for(settings, name))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        key = backend.to_str() + str(tokenizer("x")["input_ids"]) if backend else name
        if key not in by_tokenizer:
            by_tokenizer[key] = list(corpus.samples(settings.corpus, tokenizer, settings.n_samples, settings.n_tokens))
        found[name] = by_tokenizer[key]
    return found


def _measure(
    settings: BugOrRoundingSettings,
    models: list[dict[str, Any]],
    texts: dict[str, list[corpus.Sample]],
    measure: Measure,
    extra: tuple[dict[str, Any], Extra] | None,
    writer: records.Writer,
) -> None:
    todo = [(model, dtype) for model in models for dtype in settings.dtypes]
    for model, dtype in progress.track(todo, label="full pass against cache: model and dtype"):
        name = model["asked_for"]
        if (unit := f"{name}|{dtype}") in writer.done:
            continue
        loaded = loading.load(
            name,
            weights=past_tables.weights_for(settings, name),
            dtype=dtype,
            device=settings.device,
            seed=settings.seed,
        )
        about = {"model": loaded.name, "weights": loaded.weights, "dtype": dtype}
        with torch.inference_mode():
            writer.append(unit, [about | row for row in measure(loaded, texts[name])])
    for dtype in settings.dtypes if extra else ():
        if (unit := f"extra|{dtype}") not in writer.done:
            with torch.inference_mode():
                writer.append(unit, list(extra[1](dtype)))
