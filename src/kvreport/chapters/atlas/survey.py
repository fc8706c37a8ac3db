"""The survey of architectures: rows, one an architecture, see ``data/README.md``."""

import json

from kvbook import progress
from kvbook.atlas import PATHS, STATIC, SWITCHED, WHOLE, configurations, invariance, running
from kvbook.models import placement
from kvbook.runs import Experiment, Inputs, Writer
from kvreport.chapters.atlas import AtlasSettings

_WORKERS = 2
COLUMNS = (
    "architecture", "class", "status", "reason", "cache", "parameters", "causal", f"{STATIC}, declared",
    *(f"{path}, {what}" for path in PATHS for what in ("drift", "error", "not tried", "first wrong position")),
    f"{WHOLE}, tokens fed", "dtypes left out",
    *(f"first {what}, {dtype}" for dtype in SWITCHED for what in ("operation", "kind")),
    *(f"{path}, row-invariant {dtype}" for dtype in SWITCHED for path in invariance.SWITCHED_PATHS),
    *(f"row-invariant {dtype} left out" for dtype in SWITCHED), "row_invariant",
)


def names(settings: AtlasSettings) -> list[str]:
    """List the architectures that are asked for."""
    everything = settings.architectures == ("all",)
    return configurations.names() if everything else configurations.known(settings.architectures)


def inputs(settings: AtlasSettings) -> Inputs:
    """Name the architectures, and refuse a device or an architecture that is not there; no model is read."""
    placement.device_of(settings.device)
    return {"models": [], "listed": names(settings)}


def measure(settings: AtlasSettings, made_of: Inputs, writer: Writer) -> None:
    """Measure each architecture in a process of its own."""
    waiting = [name for name in made_of["listed"] if name not in writer.done]
    rows = running.measured(waiting, _WORKERS, device=settings.device)
    for row in progress.track(rows, len(waiting), "atlas: architecture"):
        if unknown := row.keys() - {*COLUMNS, *running.versions(), "seconds"}:
            raise AssertionError(f"the row of {row['architecture']} has columns that the run does not: {unknown}")
        values = ((column, row.get(column)) for column in COLUMNS)
        flat = {column: json.dumps(value) if isinstance(value, dict) else value for column, value in values}
        writer.append(row["architecture"], [flat])


EXPERIMENT = Experiment(
    "atlas", AtlasSettings, inputs, measure, fields=frozenset({"architectures", "device"}), own_threads=True
)
