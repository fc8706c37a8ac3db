"""What the experiments on the thread's model share: the model, its texts, and what a run is made of."""

from collections.abc import Callable
from typing import Any

import torch

from kvbook.errors import UserError
from kvbook.models import placement
from kvbook.runs import experiment as frame
from kvbook.runs import records
from kvreport.chapters.from_scratch.gpt import checkpoints, text
from kvreport.chapters.from_scratch.settings import ScratchSettings


def identity(settings: ScratchSettings) -> dict[str, Any]:
    """Name the model, and refuse what cannot be run before anything is.

    Raises
    ------
    UserError
        For a model, device, dtype or corpus that is not there, or texts longer than the table of positions.
    """
    placement.check(settings.device, settings.dtypes)
    model = checkpoints.identify(settings.model, settings.weights, settings.seed, settings.corpus, settings.device)
    longest = model["shape"]["table"] // model["shape"]["block"]
    if settings.n_blocks > longest:
        raise UserError(
            f"n_blocks = {settings.n_blocks}: the model's table of positions ends after {longest} blocks; lower n_blocks"
        )
    texts(settings, checkpoints.load_vocabulary(settings.model, settings.corpus), model["shape"]["block"])
    return model


def recorded(
    name: str, module: str, settings: ScratchSettings, measure: Callable[[records.Writer], None], fields: set[str]
) -> records.Run:
    """Give the run of one of the thread's experiments: `frame.recorded` with the thread's model and texts.

    Parameters
    ----------
    name, module : str
        The experiment's name, and where it is measured.
    settings : ScratchSettings
        What to run.
    measure : callable
        Appends every unit that ``writer.done`` does not hold yet.
    fields : set of str
        The settings on which its rows depend, besides model, weights, device, seed, corpus and ``n_blocks``.

    Raises
    ------
    UserError
        As `identity` and `frame.recorded`.
    """
    models = [identity(settings)]
    return frame.recorded(
        name, module, settings, measure,
        fields={"model", "weights", "device", "seed", "corpus", "n_blocks"} | fields,
        models=models, corpus=text.describe(settings.corpus, "held-out"),
    )  # fmt: skip


def load(settings: ScratchSettings, dtype: str) -> checkpoints.Loaded:
    """Load the model of the settings in a dtype."""
    return checkpoints.load(
        settings.model, settings.weights, settings.seed, settings.corpus, dtype, settings.device
    )  # fmt: skip


def texts(settings: ScratchSettings, vocabulary: text.Vocabulary, block: int) -> list[text.corpus.Sample]:
    """Cut the held-out texts: `n_blocks` blocks and the character behind them."""
    return text.samples(settings.corpus, vocabulary, settings.n_samples, settings.n_blocks * block + 1)


def ids_of(samples: list[text.corpus.Sample], device: torch.device) -> torch.Tensor:
    """Stack samples, shape (n_samples, n_characters), int64."""
    return torch.tensor([sample.ids for sample in samples], device=device)
