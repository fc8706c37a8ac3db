"""Products of matrices taken apart: which rows have equal bits, in which order terms add up, and what function does it.

The map of one product tells with how many rows a row is bitwise identical to the same row among the most rows.  The
numbers are such that every sum is zero, pair by pair, and rounding is all that is left: sums of random numbers, rounded
to 16 bits, hide nearly every difference (`kvbook.exact.kernels.pairs`).

A large number and its negative, among ones, swallow every one that is added between them.  So the sum tells how many
terms stand in the smallest partial sum that holds both, and pair by pair the order comes to light (FPRev, Xie and
others, 2025).

Rows, one a (dtype, threads, inner size, number of rows), and one a (number of threads, dtype, shape, number of rows):
see ``data/README.md``.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from kvbook import UserError
from kvbook.exact.kernels import draw, pairs, spread
from kvbook.measuring import agreement
from kvbook.models import placement
from kvbook.runs import Experiment, Inputs, Rows, Writer, threads
from kvreport.chapters.where_drift_begins import WhereDriftBeginsSettings, kernels
from kvreport.chapters.where_drift_begins.rows import ATTENTION, MULTIPLYING, UNREPORTED, WRITTEN

# A row's numbers, the large one and the one: no sum of ones moves the large one in 32 bits; in 16 a sum can be told.
_SWALLOWING = {"float16": (2.0**15, 2.0**15, 2.0**-24)}
_OTHERS = (1.0, 2.0**100, 1.0)
# What `perf report` says of a function: its share of the samples, the file it is in, and its name.
_SAMPLED = re.compile(r"\s*(?P<share>[\d.]+)%\s+(?P<file>\S+).*? \[\.\] (?P<name>.*?)(?:\s{2}|\s*$)")

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


def partial_sums(rows: int, sizes: list[int], dtype: str, first: int, product: Callable = linear) -> torch.Tensor:
    """Count, in a product of some rows, the terms of the smallest partial sum that holds one term and each other."""
    (outer, inner), of = sizes, getattr(torch, dtype)
    scale, big, one = _SWALLOWING.get(dtype, _OTHERS)
    x, outside = torch.full((rows, inner), scale, dtype=of), torch.zeros(rows, inner, dtype=torch.float64)
    for columns in torch.arange(inner).split(outer):
        # As many ones at a time as the dtype counts without rounding.
        for ones in torch.arange(inner).split(round(2 / torch.finfo(of).eps)):
            weight = torch.zeros(outer, inner).index_fill_(1, ones, one)
            weight[:, first] = big
            weight[torch.arange(len(columns)), columns] = -big
            outside[:, columns] += product(x, weight.to(of))[:, : len(columns)].double() / (scale * one)
    return (inner - outside).index_fill_(1, torch.tensor(first), 1)


def in_turn(counts: torch.Tensor) -> tuple[int, int]:
    """Tell how many terms follow one another in one running sum, and how many such sums take the terms in turn."""
    found, length = set(counts.tolist()), 1
    while length + 1 in found:
        length += 1
    # On average: its terms may come in groups, and the first and the last of all out of step.
    return length, round(int((counts <= length).nonzero().max()) / max(length - 1, 1))


def kept(rows: int, sizes: list[int], dtype: str, product: Callable = linear) -> float:
    """Add to 1 terms that its dtype is too coarse for, and tell which share of them is in the sum."""
    (outer, inner), of = sizes, getattr(torch, dtype)
    small = torch.finfo(of).eps / 4
    x = torch.full((rows, inner), small, dtype=of).index_fill_(1, torch.tensor(0), 1)
    return (float(product(x, torch.ones(outer, inner, dtype=of))[0, 0]) - 1) / (small * (inner - 1))


def function_of(call: Callable[[], Any]) -> str:
    """Name the function that takes the most time of a call, copying left aside; a busy machine is sampled longer."""
    return next((name for name in map(partial(_profiled, call), (0.5, 2, 8)) if name != UNREPORTED), UNREPORTED)


def _profiled(call: Callable[[], Any], seconds: float) -> str:
    """Call again and again under ``perf``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "samples")
        sampling = ["perf", "record", "-q", "-F", "1999", "-o", file, "-p", str(os.getpid())]
        with subprocess.Popen(sampling, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as recorder:
            while not file.exists() and recorder.poll() is None:
                time.sleep(0.01)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                call()
            recorder.send_signal(signal.SIGINT)
        asked = ["perf", "report", "-i", file, "--stdio", "-q", "--no-children", "--sort", "dso,symbol"]
        return most_sampled(subprocess.run(asked, capture_output=True, text=True, check=False).stdout)


def most_sampled(report: str) -> str:
    """Read the function with the most samples among torch's and those that oneDNN writes when it runs."""
    shares: Counter[str] = Counter()
    for line in filter(None, map(_SAMPLED.match, report.splitlines())):
        if "libtorch" in line["file"] and "copy" not in line["name"] and re.match(MULTIPLYING, line["name"]):
            shares[re.sub(r"\(anonymous namespace\)::|[<(].*", "", line["name"])] += float(line["share"])
        elif line["file"] == "[JIT]":
            shares[WRITTEN] += float(line["share"])
    return shares.most_common(1)[0][0] if shares else UNREPORTED


def inputs_of_sums(settings: WhereDriftBeginsSettings) -> Inputs:
    """Name the model, of which only shapes are used, and refuse to profile without a profiler."""
    if settings.profiled and not shutil.which("perf"):
        raise UserError("profiled: functions are named by Linux's `perf`, which is not installed; leave it out")
    return kernels.inputs(settings)


def measure_sums(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Take the products of every shape apart, and hold them against those of the most rows."""
    # Operations of equal shapes are measured once.
    shapes, by_shape = kernels.operations(settings), {}
    for operation, sizes in shapes.items():
        by_shape.setdefault((operation == ATTENTION, *sizes), []).append(operation)
    units = {
        f"{count}|{dtype}|{operations[0]}": (count, dtype, operations)
        for count in settings.threads for dtype in settings.dtypes for operations in by_shape.values()
    }
    for unit, (count, dtype, operations) in writer.pending(units, "order of sums: shape"):
        sizes = shapes[operations[0]]
        about = {"threads": count, "dtype": dtype, "operations": ", ".join(operations)}
        about |= {"outer_size": sizes[0], "inner_size": sizes[1]}
        # A profiler takes seconds a call, and with more threads the functions are no others.
        profiled = settings.profiled and count == settings.threads[0]
        with threads.using(count):
            writer.keep(unit, about, compare_sums(settings, dtype, operations[0], sizes, profiled))


def compare_sums(
    settings: WhereDriftBeginsSettings, dtype: str, operation: str, sizes: list[int], profiled: bool
) -> Rows:
    """Name what runs for each number of rows, and compare order and bits with those of the most rows."""
    most, of = max(settings.kernel_rows), getattr(torch, dtype)
    x, weight = (t.to(of) for t in factors(most, sizes[1], sizes[0], settings.seed))
    whole, wholly = linear(x, weight), None
    for rows in sorted(settings.kernel_rows, reverse=True):
        call = kernels.call(dtype, operation, sizes, rows)
        names = sorted({name for name, _ in kernels.kernels(kernels.report_of(call))})
        row = {"rows": rows, "kernel": " and ".join(names) or UNREPORTED}
        row["function"] = function_of(call) if profiled else ""
        if operation != ATTENTION:
            # From both ends: what differs in the last terms alone shows too.
            found = torch.stack([partial_sums(rows, sizes, dtype, first) for first in (0, sizes[1] - 1)])
            wholly = found if wholly is None else wholly
            length, sums = in_turn(found[0, 0])
            row |= {"in_a_row": length, "sums": sums, "order_equal": int(torch.equal(found, wholly[:, :rows]))}
            equal = agreement.bits_equal(linear(x[:rows], weight), whole[:rows]).all(-1)
            row |= {"equal_rows": int(equal.sum()), "kept": kept(rows, sizes, dtype)}
        yield row


SUMS = Experiment(
    "summation", WhereDriftBeginsSettings, inputs_of_sums, measure_sums, own_threads=True,
    fields=frozenset({"model", "weights", "device", "seed", "dtypes", "kernel_rows", "threads", "profiled"}),
)
