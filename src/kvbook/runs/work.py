"""How much an experiment runs a model, and the line that says so before one on a large trained model starts."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from kvbook import lengths, progress
from kvbook.settings import Settings, TextSettings, Weights, memory_of

if TYPE_CHECKING:
    from kvbook.measuring import costs

# Parameters from which on an experiment takes long enough to be announced.
LARGE = 50_000_000


class Work(NamedTuple):
    """Passes of each model in each dtype.

    Attributes
    ----------
    n_tokens : int
        Tokens of a pass.
    passes : float
        How many passes of so many tokens.
    steps : float
        How many passes of a single token.
    dtypes : tuple of str
        In each of which all this is done.
    in_fp64 : float
        Further passes of `n_tokens` in double precision, for each dtype, of a copy that is loaded beside the model.
    copies : int
        How many copies of the model are held in the dtype at a time.
    """

    n_tokens: int
    passes: float
    steps: float = 0
    dtypes: tuple[str, ...] = ("float32",)
    in_fp64: float = 0
    copies: int = 1

    @staticmethod
    def per_text(passes: float, steps: float = 0) -> "Callable[[TextSettings], Work]":
        """Make the `work` of an experiment that does as much with each of its texts."""
        return lambda settings: Work(
            lengths.middle(settings.n_tokens), passes * settings.n_samples, steps * settings.n_samples, settings.dtypes
        )


def predict(work: Work, settings: Settings, models: Iterable[Mapping[str, Any]]) -> "costs.Cost | None":
    """Predict what an experiment takes, by its large models that are trained; None where it has none."""
    # Imports torch, which whoever only lists experiments need not wait for.
    from kvbook.measuring import costs
    from kvbook.models import sources

    found = [
        _of_one(work, settings, model)
        for model in models
        if model.get("parameters", 0) >= LARGE and model["weights"] not in sources.DRAWN
    ]
    return costs.Cost(max(cost.n_bytes for cost in found), sum(cost.seconds for cost in found)) if found else None


def _of_one(work: Work, settings: Settings, model: Mapping[str, Any]) -> "costs.Cost":
    from kvbook.measuring import costs
    from kvbook.models import kept, loading

    # A folder, a file and a hub id bring their own weights, whatever is asked for.
    weights = model["weights"] if model["weights"] in get_args(Weights) else "stand-in"
    config = loading.config_of(model.get("asked_for", settings.model), weights)
    main = costs.predict(
        config, work.dtypes, work.n_tokens, n_passes=work.passes, n_steps=work.steps, device=settings.device,
        n_copies=work.copies,
    )
    # What takes more than a limit is streamed.
    limit = memory_of(settings) or float("inf")
    n_bytes = min(limit, main.n_bytes + kept.beside(loading.parameter_count(config), work.dtypes))
    if not work.in_fp64:
        return costs.Cost(n_bytes, main.seconds)
    n_passes = work.in_fp64 * len(work.dtypes)
    beside = costs.predict(config, ["float64"], work.n_tokens, n_passes=n_passes, device=settings.device)
    return costs.Cost(n_bytes + beside.n_bytes, main.seconds + beside.seconds)


def announced(
    work: Work | None, settings: Settings, models: Iterable[Mapping[str, Any]]
) -> AbstractContextManager[None]:
    """Say, while this is open, what an experiment was predicted to take; nothing where it is small."""
    cost = work and predict(work, settings, models)
    return progress.headed(f"predicted: {cost.line()}") if cost else nullcontext()
