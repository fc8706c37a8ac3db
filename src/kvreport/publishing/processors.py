"""How pages name a processor: by its maker's name, and by what tells it from others of that name.

And which runs are behind a figure, a table or a statement: kept beside it, and named where it is cited.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvbook import paths
from kvbook.runs.records import SHORT_HASH, Run
from kvbook.settings import read_yaml
from kvreport.publishing import wording

# Vendor, family, first and last model, name, and the instructions that it must have and must not have.  A hypervisor
# can report a model and instructions that no chip has together: then the numbers stand, and no name.
_NAMED = (
    ("AuthenticAMD", 25, 0, 15, "Zen 3", {"avx2"}, {"avx512f"}),
    ("AuthenticAMD", 25, 16, 31, "Zen 4", {"avx512_bf16"}, {"avx512_fp16", "amx_bf16"}),
    ("GenuineIntel", 6, 106, 106, "Ice Lake", {"avx512f"}, {"avx512_bf16", "amx_bf16"}),
    ("GenuineIntel", 6, 143, 143, "Sapphire Rapids", {"amx_bf16"}, {"amx_fp16"}),
    ("GenuineIntel", 6, 207, 207, "Emerald Rapids", {"amx_bf16"}, {"amx_fp16"}),
)
# A variable of the environment that keeps a library from some instructions stands behind the processor's name.
LIMIT = re.compile(r"=(?P<to>\w+)")
# The first one that a processor has says most about which kernels a library takes.
_TELLING = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd")


@functools.cache
def _notes() -> dict[str, dict[str, Any]]:
    """Read what is known of processors whose runs did not record it."""
    return read_yaml(paths.PROCESSORS) if paths.PROCESSORS.is_file() else {}


def is_recorded(machine: Mapping[str, Any]) -> bool:
    """Tell whether a run recorded which processor it had."""
    return "cpu" in machine


def _known(machine: Mapping[str, Any]) -> Mapping[str, Any]:
    return machine["cpu"] if is_recorded(machine) else _notes().get(machine["processor"].partition(", ")[0], {})


def _common(machines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is known of these machines' processors, where it is the same for all."""
    first, *others = map(_known, machines)
    found = {key: first[key] for key in first if all(other.get(key) == first[key] for other in others)}
    instructions = set(first.get("instructions", ())).intersection(*(one.get("instructions", ()) for one in others))
    return found | {"instructions": instructions}


def _kind(known: Mapping[str, Any]) -> str:
    """Name the microarchitecture where that is beyond doubt, else family and model."""
    family, model, has = known.get("family"), known.get("model"), known["instructions"]
    if not isinstance(family, int):
        return ""
    if not isinstance(model, int):
        return f"family {family}"
    for vendor, of_family, first, last, name, must, must_not in _NAMED:
        is_model = (known.get("vendor"), family) == (vendor, of_family) and first <= model <= last
        if is_model and must <= has and not must_not & has:
            return name
    return f"family {family} model {model}"


def label(machines: Iterable[Mapping[str, Any]], remark: str = "") -> str:
    """Name the processor that all of these machines had, such as ``AMD EPYC (Zen 4, avx512_bf16)``.

    All have one name of a processor, which is all that is said where no more is known.  A remark stands in the brackets
    too.
    """
    machines = list(machines)
    name, *limits = machines[0]["processor"].split(", ")
    known = _common(machines)
    telling = next((one for one in _TELLING if one in known["instructions"]), "")
    said = [part for part in (_kind(known), telling) if part]
    brackets = f" ({', '.join([*said, *filter(None, [remark])])})" if said else ""
    return ", ".join([f"{wording.processor(name)}{brackets}", *limits])


def in_few_words(machine: Mapping[str, Any]) -> str:
    """Name the device of one run for a caption, such as ``AMD EPYC (Zen 4)``; empty where rows depend on none."""
    if machine.get("device", "cpu") != "cpu" or "processor" not in machine:
        return machine.get("device_name", "")
    name, *limits = machine["processor"].split(", ")
    kind = _kind(_common([machine]))
    return ", ".join([wording.processor(name) + f" ({kind})" * kind.startswith("Zen"), *limits])


def device(machine: Mapping[str, Any]) -> str:
    """Name the device of one run, and say where its processor is known from notes alone."""
    if machine.get("device", "cpu") != "cpu" or "processor" not in machine:
        return machine.get("device_name", "")
    said = label([machine], "" if is_recorded(machine) else "from notes")
    return machine["device_name"].replace(machine["processor"], said, 1)


def of_run(run: Run) -> dict[str, Any]:
    """Keep of a run its hashes, the machine that made it, and whether it is a recorded one."""
    hashes = run.about["hash"]
    return {
        # Runs of several seeds are joined, and each has a hash.
        "runs": hashes if isinstance(hashes, list) else [hashes],
        "machine": run.about.get("machine"),
        "recorded": "recorded" in run.about,
    }


def are_recorded(made_by: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether all runs ship with the book: what only this machine ran nobody else can look up."""
    return all(made["recorded"] for made in made_by)


def measured(made_by: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say of each experiment its models, dtypes and number of independent units; those of equal words once."""
    said = []
    for made in made_by:
        dtypes = " ".join(wording.DTYPES.get(dtype, dtype) for dtype in made.get("dtypes", ()))
        units = " ".join(map(str, made.get("units", ())))
        facts = [wording.weights_said(", ".join(made["models"])), dtypes, f"n = {units}" if units else ""]
        said.append(f"{made.get('experiment', 'measured')}: {', '.join(filter(None, facts))}" if any(facts) else "")
    return list(dict.fromkeys(filter(None, said)))


def named(made_by: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name runs by their short hashes, those of one machine and its versions together."""
    together: dict[tuple[str, str], list[str]] = {}
    for made in made_by:
        kind = "recorded run" if made["recorded"] else "run"
        together.setdefault((kind, _place(made["machine"])), []).extend(run[:SHORT_HASH] for run in made["runs"])
    return [f"{kind}{'s' * (len(runs) > 1)} {', '.join(runs)}{place}" for (kind, place), runs in together.items()]


def _place(machine: Mapping[str, Any] | None) -> str:
    if machine is None:
        return ""
    return f" on {device(machine)}, torch {machine['torch']}, transformers {machine['transformers']}"
