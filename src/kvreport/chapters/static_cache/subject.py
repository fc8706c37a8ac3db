"""The model that is timed, counted and looked into; apart from the clock, which not every experiment on it needs."""

from typing import Any

from kvbook.models import loading, placement, registry
from kvreport.chapters.static_cache.settings import StaticCacheSettings


def weights_of(settings: StaticCacheSettings) -> str:
    """Choose the weights of the timed model: those asked for; a folder and a hub id bring their own."""
    return settings.weights if settings.model in registry.families() else "stand-in"


def identify(settings: StaticCacheSettings) -> dict[str, Any]:
    """Name the timed model, and refuse a dtype or device that is not there, before anything is loaded."""
    placement.dtype_on(settings.dtype, placement.device_of(settings.device))
    return loading.identify(settings.model, weights_of(settings), settings.seed)


def load(settings: StaticCacheSettings) -> loading.Loaded:
    """Load the timed model."""
    return loading.load(
        settings.model, weights=weights_of(settings), dtype=settings.dtype, device=settings.device, seed=settings.seed
    )
