"""What every caption must say, put in words from a run's own record."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvbook import lengths
from kvbook.measuring.estimates import FEWEST_UNITS
from kvbook.runs.records import Run

WEIGHTS = {
    "stand-in": "stand-ins trained for this book",
    "hub": "weights from the hub",
    "package": "135 M, 4-bit-rounded weights",
    "gguf": "weights from a GGUF file",
    "local": "weights from a local folder",
    "random": "true shape, random weights",
    "untrained": "stand-ins' shape, random weights",
}
# What a table of claims says of its verdicts.
VERDICTS = (
    "“In kind”: the mechanism is shown on stand-ins or random weights, so its magnitude is not. The column n counts independent "
    "units, not rows."
)
DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def models(run: Run) -> str:
    """Name a run's models with their sizes, those with weights of one kind together, as a sentence begins."""
    groups: dict[str, list[str]] = {}
    for model in run.about["models"]:
        stored = f", {model['quantization']}" if "quantization" in model else ""
        size = f"{model['name']} ({model['layers']} layers, {model['parameters'] / 1e6:,.1f} M parameters{stored})"
        groups.setdefault(model["weights"], []).append(size)
    named = "; ".join(f"{WEIGHTS[weights]}: {', '.join(names)}" for weights, names in groups.items())
    return named[:1].upper() + named[1:]


def corpus(run: Run) -> str:
    """Name the text that a run was measured on."""
    about: dict[str, Any] = run.about["corpus"]
    if about["corpus"] == "stdlib":
        return f"the held-out part of Python {about['python']}'s standard library"
    return "a folder of text files"


def machine(run: Run) -> str:
    """Name the device, and the version of torch, whose kernels decide the bits."""
    about = run.about["machine"]
    return f"{about['device_name']}, torch {about['torch']}"


def samples(run: Run) -> str:
    """Say how many samples of what."""
    settings = run.about["settings"]
    return f"{settings['n_samples']} samples of {lengths.said(settings['n_tokens'])} tokens of {corpus(run)}"


def published(said: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Give captions in the form in which `Page.figure` and `Page.table` take them."""
    return {
        name: {"name": name, "caption": caption} | ({"alt": alt} if alt else {})
        for name, (caption, alt) in said.items()
    }


def processor(name: str) -> str:
    """Name a processor without its marks: `Intel Xeon`."""
    return name.replace("(R)", "").removesuffix(" Processor")


def listed(parts: Sequence[str]) -> str:
    """Join parts as a sentence does: a, b and c."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def in_dtypes(said: Mapping[str, str]) -> str:
    """Join what is said of each dtype, and of several dtypes once: 3 in fp32 and none in fp16 and bf16."""
    together: dict[str, list[str]] = {}
    for dtype, words in said.items():
        together.setdefault(words, []).append(DTYPES[dtype])
    return listed([f"{words} in {listed(dtypes)}" for words, dtypes in together.items()])


def percent(share: float) -> str:
    """Write a share in whole per cent, without rounding some to none or most to all."""
    return "<1%" if 0 < share < 0.005 else ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def power_of_ten(value: float, digits: int = 1) -> str:
    """Write a number as 1.5 × 10⁻⁵, for prose."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return mantissa if int(exponent) == 0 else f"{mantissa} × 10{raised}"


def between(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Write the least and the largest of several numbers, or the one that they are written as."""
    values = list(values)
    return " to ".join(dict.fromkeys((form.format(min(values)), form.format(max(values)))))


def of_all(count: int, total: int) -> str:
    """Write how many of all: `all 3`, or `2 of 3`."""
    return f"all {total}" if count == total > 1 else f"{count} of {total}"


def too_few(rows: pd.DataFrame) -> bool:
    """Tell whether rows are of so few files that a bootstrap over them says nothing."""
    return rows["source"].nunique() < FEWEST_UNITS


def size(value: float) -> str:
    """Write a difference: as a power of ten where it is small."""
    return power_of_ten(value) if value < 0.01 else f"{value:.2g}"


def brackets(rows: pd.DataFrame, of: str = "file") -> str:
    """Say what the ends beside an estimate are, by how many values there are."""
    count = rows["source"].nunique()
    if count < FEWEST_UNITS:
        return f"lowest to highest of {count} {of}{'s' * (count > 1)}"
    return f"95 % interval (bootstrap over {count} {of}s)"
