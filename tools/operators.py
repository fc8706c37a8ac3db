"""Write which operators decode steps call, and what row-invariant arithmetic does with them.

The file is ``data/exact/operators.txt``::

    python tools/operators.py

Each causal architecture of transformers decodes two tokens as a tiny model with random weights, on a CPU.
"""

from collections import Counter
from collections.abc import Iterable

from kvbook import paths
from kvbook.atlas import columns, configurations
from kvbook.exact import treatments

FILE = paths.DATA / "exact" / "operators.txt"
HEAD = "operator", "architectures", "on a CPU", "on a GPU"


def called(name: str) -> set[str]:
    """Return what an architecture calls, in bf16 or, where it does not compute in that, in fp32."""
    for dtype in ("bfloat16", "float32"):
        try:
            fed = columns.ready(name, dtype, "cpu")
            return treatments.operators(fed.model, lambda fed=fed: fed.in_parts(configurations.text(4), [2, 1, 1]))
        except Exception as error:
            print(f"{name}, {dtype}: {columns.in_one_line(error)}")
    return set()


def line(operator: str, *cells: object) -> str:
    """Lay out one row."""
    return f"{operator:36s} {cells[0]!s:>13} {cells[1]!s:27s} {cells[2]!s}"


def table(names: Iterable[str]) -> list[str]:
    """Lay out all operators, those first that most architectures call."""
    count = Counter(operator for name in names for operator in called(name))
    ordered = sorted(count, key=lambda operator: (-count[operator], operator))
    treated = [[treatments.treatment(operator, key) for key in ("CPU", "CUDA")] for operator in ordered]
    return [line(*HEAD), *(line(one, count[one], *how) for one, how in zip(ordered, treated, strict=True))]


def main() -> None:
    """Write the file."""
    FILE.write_text("\n".join(table(configurations.names())) + "\n", "utf-8")


if __name__ == "__main__":
    main()
