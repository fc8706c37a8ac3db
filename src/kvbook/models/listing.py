"""What models there are, for the command line and for the page on the models."""

import pandas as pd

from kvbook.models import loading, packages, registry, sources


def text() -> str:
    """Write the families as lines of text: name, source, hub id, parameters, GiB of weights in fp32 and in 16 bits."""
    rows = []
    for name, family in registry.families().items():
        if name in sources.families_with("stand-in"):
            rows.append((name, "stand-in", "ships with the book", loading.standin_facts(name)["parameters"]))
        if package := family.package:
            where = f"{package.title}, {'fetched' if packages.is_here(name) else 'kvbook models fetch'}"
            rows.append((name, "package", where, package.parameters))
        rows += [(name, "hub or random", each.hub_id, each.parameters) for each in family.architectures]
    table = pd.DataFrame(rows, columns=["family", "weights", "from", "parameters"])
    for column, n_bytes in (("fp32, GiB", 4), ("16-bit, GiB", 2)):
        table[column] = (table["parameters"] * n_bytes / 2**30).map("{:.2f}".format)
    return table.to_string(index=False, formatters={"parameters": "{:,}".format})
