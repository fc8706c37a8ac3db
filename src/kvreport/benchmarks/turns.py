"""What a bench is asked for, and how two pieces of work take turns in it."""

import statistics
from collections.abc import Callable, Sequence

import torch

from kvbook import progress
from kvbook.measuring import timing
from kvbook.models import loading
from kvbook.runs import Row
from kvbook.settings import DTypeName, Settings, Text, at_least

# Does a piece of work, and returns its seconds.
Timed = Callable[[], float]


class BenchSettings(Settings):
    """Settings of a bench.

    Attributes
    ----------
    shape : str
        Family whose full-size architecture, with random weights, decodes.
    dtype : str
        In which it does.
    n_samples : int
        Texts of the drift harness.
    n_new_tokens : int
        Tokens that each way of decoding writes.
    n_repeats : int
        How often each of two ways has its turn.
    book : bool
        Whether the book is built too, which takes minutes.
    profile : str
        With which parameters.
    tests : bool
        Whether all tests are run too, which takes minutes.
    """

    shape: Text = "smollm2"
    dtype: DTypeName = "bfloat16"
    n_samples: at_least(2) = 10
    n_new_tokens: at_least(5) = 48
    n_repeats: at_least(2) = 10
    book: bool = False
    profile: str = "smoke"
    tests: bool = False


def row(what: str, against: str, ours: Sequence[float], theirs: Sequence[float], n: int = 1) -> Row:
    """Say how many times as long the second takes, turn by turn; seconds are of one of n equal pieces."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "what": what, "against": against,
        "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "repeats": len(ratios),
        "seconds": statistics.median(ours) / n, "against_seconds": statistics.median(theirs) / n,
    }


def by_turns(what: str, ours: Timed, against: str, theirs: Timed, repeats: int, n: int = 1) -> Row:
    """Let two pieces of work take turns; the first round only warms up."""
    rounds = [(ours(), theirs()) for _ in progress.track(range(repeats + 1), label=f"{what}: round")]
    return row(what, against, *zip(*rounds[1:], strict=True), n=n)


def timer(device: torch.device, work: Callable[[], object]) -> Timed:
    """Do a piece of work and return its seconds, each time that it is called."""
    return lambda: timing.timed(work, device)[1]


def random_model(settings: BenchSettings, n_tokens: int, dtype: str = "") -> tuple[torch.nn.Module, torch.Tensor]:
    """Load the full-size shape with random weights, in the bench's dtype or another, and draw a text for it."""
    asked = {"weights": "random", "dtype": dtype or settings.dtype, "device": settings.device, "seed": settings.seed}
    model = loading.load(settings.shape, **asked).model
    generator = torch.Generator().manual_seed(settings.seed)
    return model, torch.randint(model.config.vocab_size, (1, n_tokens), generator=generator).to(model.device)
