"""What models there are, for the command line and for the page on the models."""

import pandas as pd

from kvbook import paths
from kvbook.models import loading, packages, registry


def shipped() -> list[str]:
    """Name the families whose stand-ins are there, in the registry's order."""
    return [name for name in registry.families() if (paths.STANDINS / name / "training.json").is_file()]


def text() -> str:
    """Write the families as lines of text: name, source, hub id, parameters, GiB of weights in fp32 and in 16 bits."""
    rows = []
    for name, family in registry.families().items():
        if name in shipped():
            count = loading.standin_facts(name)["parameters"]
            rows.append((name, "stand-in", "ships with the book", count, count * 4, count * 2))
        if family.package:
            count = family.package.parameters
            where = f"{family.package.title}, {'fetched' if packages.is_here(name) else 'kvbook models fetch'}"
            rows.append((name, "package", where, count, count * 4, count * 2))
        for architecture in family.architectures:
            count = architecture.parameters
            rows.append((name, "hub or random", architecture.hub_id, count, count * 4, count * 2))
    table = pd.DataFrame(rows, columns=["family", "weights", "from", "parameters", "fp32, GiB", "16-bit, GiB"])
    gib = "{:.2f}".format
    in_gib = {column: lambda n_bytes: gib(n_bytes / 2**30) for column in ("fp32, GiB", "16-bit, GiB")}
    return table.to_string(index=False, formatters={"parameters": "{:,}".format, **in_gib})
