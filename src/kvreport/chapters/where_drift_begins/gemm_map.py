"""The map of one matrix product: with how many rows a row is bitwise identical to the same row among the most rows.

The numbers are such that every sum is zero, pair by pair, and rounding is all that is left: sums of random numbers,
rounded to 16 bits, hide nearly every difference (`kvbook.exact.kernels.pairs`).  Rows, one a (dtype, threads, inner
size, number of rows): see ``data/README.md``.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from kvbook.exact.kernels import draw, pairs, spread
from kvbook.measuring import agreement
from kvbook.models import placement
from kvbook.runs import Experiment, Inputs, Rows, Writer, threads
from kvreport.chapters.where_drift_begins import WhereDriftBeginsSettings

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def factors(rows: int, inner: int, outer: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the rows and the weight of a product whose every sum is zero but for rounding, in 32 bits."""
    plus, minus = pairs(inner, seed)
    terms = draw((rows, len(plus)), seed) * spread(len(plus))
    x, weight = torch.zeros(rows, inner), draw((outer, inner), seed + 1)
    x[:, plus], x[:, minus] = terms, -terms
    weight[:, minus] = weight[:, plus]
    return x, weight


def compare(x: torch.Tensor, weight: torch.Tensor, product: Product = linear) -> Rows:
    """Multiply the first 1, 2, ... rows and compare every row with the product of all."""
    everything = product(x, weight)
    for rows in range(1, len(x) + 1):
        equal = agreement.bits_equal(everything[:rows], product(x[:rows], weight)).all(-1)
        yield {"rows": rows, "first_row_equal": int(equal[0]), "equal_rows": int(equal.sum())}


def inputs(settings: WhereDriftBeginsSettings) -> Inputs:
    """Refuse a device or dtype that is not there; no model is read."""
    placement.check(settings.device, settings.dtypes)
    return {"models": []}


def measure(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Map the product for every dtype, number of threads and inner size."""
    device = placement.device_of(settings.device)
    # Threads are the CPU's; a GPU's product does not know them.
    counts = settings.threads if device.type == "cpu" else settings.threads[:1]
    units = {
        f"{dtype}|{count}|{inner}": (dtype, count, inner)
        for dtype in settings.dtypes for count in counts for inner in settings.inner_sizes
    }
    for unit, (dtype, count, inner) in writer.pending(units, "map of the matrix product: case"):
        drawn = factors(settings.max_rows, inner, settings.outer_size, settings.seed)
        about = {"dtype": dtype, "threads": count, "inner_size": inner, "outer_size": settings.outer_size}
        with threads.using(count):
            writer.keep(unit, about, compare(*(t.to(device, getattr(torch, dtype)) for t in drawn)))


EXPERIMENT = Experiment(
    "gemm_map", WhereDriftBeginsSettings, inputs, measure, own_threads=True,
    fields=frozenset({"device", "seed", "dtypes", "max_rows", "inner_sizes", "outer_size", "threads"}),
)
