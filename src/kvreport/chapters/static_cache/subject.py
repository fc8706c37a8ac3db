"""The model that is timed, counted and looked into; apart from the clock, which not every experiment on it needs."""

import functools
from collections.abc import Callable

import torch

from kvbook.models import loading, placement, registry
from kvbook.runs import Inputs, Rows, Writer
from kvreport.chapters.static_cache import StaticCacheSettings


def weights_of(settings: StaticCacheSettings) -> str:
    """Choose the weights of the timed model: those asked for; a folder and a hub id bring their own."""
    return settings.weights if settings.model in registry.families() else "stand-in"


def inputs(settings: StaticCacheSettings) -> Inputs:
    """Name the timed model, and refuse a dtype or device that is not there, before anything is loaded."""
    placement.check(settings.device, [settings.dtype])
    return {"models": [loading.identify(settings.model, weights_of(settings), settings.seed)]}


def load(settings: StaticCacheSettings) -> loading.Loaded:
    """Load the timed model."""
    return loading.load(
        settings.model, weights=weights_of(settings), dtype=settings.dtype, device=settings.device, seed=settings.seed
    )


def prompt(settings: StaticCacheSettings, loaded: loading.Loaded) -> torch.Tensor:
    """Cut the prompt by a model's tokenizer, and put its ids where the model is."""
    return loaded.tokenizer(settings.prompt, return_tensors="pt")["input_ids"].to(loaded.model.device)


def measured_at_once(
    rows: Callable[[StaticCacheSettings, Inputs, loading.Loaded], Rows],
) -> Callable[[StaticCacheSettings, Inputs, Writer], None]:
    """Make the `measure` of an experiment that gives all rows of the timed model at once."""

    @functools.wraps(rows)
    def measure(settings: StaticCacheSettings, made_of: Inputs, writer: Writer) -> None:
        if "all" in writer.done:
            return
        loaded = load(settings)
        # What another experiment of this process compiled must neither be found nor count against the limit.
        torch.compiler.reset()
        writer.keep("all", loaded.about, rows(settings, made_of, loaded))
        torch.compiler.reset()

    return measure
