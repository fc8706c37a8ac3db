"""Which kernels run: what oneDNN and MKL report of the model's products and of its attention, by dtype and rows.

Both print a line for each call of theirs when asked.  What neither reports is torch's own code, or a part of oneDNN
that prints nothing.  Rows, one a (dtype, operation, number of rows, kernel, shape): see ``data/README.md``.
"""

import ctypes
import itertools
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.backends import mkl, mkldnn

from kvbook import UserError, progress
from kvbook.models import loading, placement
from kvbook.runs import Experiment, Inputs, Writer
from kvreport.chapters.where_drift_begins import WhereDriftBeginsSettings
from kvreport.chapters.where_drift_begins.rows import ATTENTION, UNREPORTED

# Keys that a few queries attend to; more queries attend to as many keys, causally.
_KEYS = 64
_MKL = re.compile(r"MKL_VERBOSE (?P<name>[A-Z]\w*)\(\w,\w,(?P<n>\d+),(?P<m>\d+),(?P<k>\d+),")
_ONEDNN = re.compile(r"onednn_verbose,v\d,primitive,exec,cpu,(?P<kind>\w+),(?P<name>[^,]+),.*,(?P<shape>[^,]+),[^,]+$")


def operations(settings: WhereDriftBeginsSettings) -> dict[str, list[int]]:
    """Name every linear layer of the model's shape once, and its attention, each with its sizes."""
    config = loading.config_of(settings.model, settings.weights)
    layers = {
        name.rpartition(".")[2]: [layer.out_features, layer.in_features]
        for name, layer in loading.shape(config).named_modules() if isinstance(layer, nn.Linear)
    }
    heads = config.num_attention_heads
    return layers | {ATTENTION: [heads, getattr(config, "head_dim", None) or config.hidden_size // heads]}


def inputs(settings: WhereDriftBeginsSettings) -> Inputs:
    """Name the model, of which only shapes are used; a GPU's libraries report in other ways."""
    if settings.device != "cpu":
        raise UserError(f"device {settings.device!r}: which kernel runs is read from what libraries of a CPU report")
    placement.check(settings.device, settings.dtypes)
    return {"models": [loading.identify(settings.model, settings.weights)]}


def kernels(report: str) -> Iterator[tuple[str, str]]:
    """Read the kernel and the product's shape, rows by inner size by columns, of each call in a report."""
    for line in report.splitlines():
        if call := _MKL.match(line):
            # Fortran's order of a matrix is the other way round.
            yield f"MKL {call['name']}", f"{call['m']}x{call['k']}x{call['n']}"
        elif call := _ONEDNN.match(line):
            yield f"oneDNN {call['name']}", call["shape"]


def report_of(call: Callable[[], Any]) -> str:
    """Make a call, and return what the libraries print of it."""
    # They write through C's buffer to the file that is number 1, past Python's.
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as file, ExitStack() as stack:
        stdout = os.dup(1)
        stack.callback(os.close, stdout)
        flush(None)
        os.dup2(file.fileno(), 1)
        try:
            for library in filter(lambda one: one.is_available(), (mkl, mkldnn)):
                stack.enter_context(library.verbose(library.VERBOSE_ON))
            call()
        finally:
            flush(None)
            os.dup2(stdout, 1)
        file.seek(0)
        return file.read()


def call(dtype: str, operation: str, sizes: list[int], rows: int) -> Callable[[], torch.Tensor]:
    """Prepare the product of some rows with a weight, or the attention of as many queries."""
    of, generator = {"dtype": getattr(torch, dtype)}, torch.Generator().manual_seed(0)
    if operation == ATTENTION:
        heads, size = sizes
        query = torch.randn(1, heads, rows, size, generator=generator, **of)
        keys = torch.randn(1, heads, max(rows, _KEYS), size, generator=generator, **of)
        return lambda: nn.functional.scaled_dot_product_attention(query, keys, keys, is_causal=rows >= _KEYS)
    x, weight = (torch.randn(shape, generator=generator, **of) for shape in ((1, rows, sizes[1]), sizes))
    return lambda: nn.functional.linear(x, weight)


def measure(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Make every call, and keep what the libraries report of it."""
    if "calls" in writer.done:
        return
    cases = itertools.product(settings.dtypes, operations(settings).items(), settings.kernel_rows)
    table = []
    with torch.inference_mode():
        for dtype, (operation, sizes), rows in progress.track([*cases], label="which kernels run: call"):
            found = Counter(kernels(report_of(call(dtype, operation, sizes, rows)))) or {(UNREPORTED, ""): 0}
            about = {"dtype": dtype, "operation": operation, "rows": rows}
            table += [about | {"kernel": name, "shape": shape, "calls": n} for (name, shape), n in found.items()]
    writer.append("calls", table)


EXPERIMENT = Experiment(
    "kernels", WhereDriftBeginsSettings, inputs, measure,
    fields=frozenset({"model", "weights", "device", "dtypes", "kernel_rows"}),
)
