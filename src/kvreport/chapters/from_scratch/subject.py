"""What the experiments on the thread's model share: the model, its texts, and what a run is made of."""

from typing import Any

import torch

from kvbook import UserError
from kvbook.models import placement
from kvbook.runs import Inputs, Row
from kvreport.chapters.from_scratch import ScratchSettings
from kvreport.chapters.from_scratch.gpt import checkpoints, text
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT

# The settings on which the rows of every experiment here depend.
FIELDS = frozenset({"model", "weights", "device", "seed", "corpus", "n_blocks", "dtypes", "n_samples"})


def identity(settings: ScratchSettings) -> dict[str, Any]:
    """Name the model, and refuse what cannot be run, such as texts longer than the table of positions."""
    placement.check(settings.device, settings.dtypes)
    model = checkpoints.identify(settings.model, settings.weights, settings.seed, settings.corpus, settings.device)
    longest = model["shape"]["table"] // model["shape"]["block"]
    if settings.n_blocks > longest:
        raise UserError(
            f"n_blocks = {settings.n_blocks}: lower it, for the model's table of positions ends after {longest} blocks"
        )
    texts(settings, checkpoints.load_vocabulary(settings.model, settings.corpus), model["shape"]["block"])
    return model


def inputs(settings: ScratchSettings) -> Inputs:
    """Name the model and its texts, and refuse what cannot be run."""
    return {"models": [identity(settings)], "corpus": text.describe(settings.corpus, "held-out")}


def load(settings: ScratchSettings, dtype: str) -> checkpoints.Loaded:
    """Load the model of the settings in a dtype."""
    return checkpoints.load(settings.model, settings.weights, settings.seed, settings.corpus, dtype, settings.device)


def load_with_texts(
    settings: ScratchSettings, dtype: str
) -> tuple[ScratchGPT, int, text.Vocabulary, list[text.corpus.Sample]]:
    """Load the model of the settings in a dtype: itself, its block, its characters, and the texts that it reads."""
    model, vocabulary = load(settings, dtype)
    return model, model.shape.block, vocabulary, texts(settings, vocabulary, model.shape.block)


def texts(settings: ScratchSettings, vocabulary: text.Vocabulary, block: int) -> list[text.corpus.Sample]:
    """Cut the held-out texts: `n_blocks` blocks and the character after them."""
    return text.samples(settings.corpus, vocabulary, settings.n_samples, settings.n_blocks * block + 1, settings.seed)


def ids_of(samples: list[text.corpus.Sample], device: torch.device) -> torch.Tensor:
    """Stack samples, shape (n_samples, n_characters), int64."""
    return torch.tensor([sample.ids for sample in samples], device=device)


def about(settings: ScratchSettings, sample: text.corpus.Sample) -> Row:
    """Say of which text a row is."""
    return {"dtype": settings.dtypes[0], "sample": sample.index, "source": sample.source, "start": sample.start}
