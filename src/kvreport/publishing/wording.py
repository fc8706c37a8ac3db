"""Numbers, names and quoted texts, as prose and tables write them; and the rows of these as files."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvbook.measuring.estimates import Estimate, written
from kvbook.models import registry

DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Stands behind the name of a family whose weights are not its own.
STAND_IN = " (stand-in)"


def processor(name: str) -> str:
    """Name a processor without its marks: `Intel Xeon`."""
    return name.replace("(R)", "").replace("(TM)", "").removesuffix(" Processor")


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


def estimated(estimate: Estimate, form: str) -> str:
    """Write an estimate with its interval; a fact has none."""
    return written(estimate.value, form) if estimate.low == estimate.high else estimate.text(form)


def scaled(estimate: Estimate, factor: float, less: float = 0) -> Estimate:
    """Multiply an estimate's distance from a number by a factor."""
    ends = (factor * (end - less) for end in (estimate.value, estimate.low, estimate.high))
    return Estimate(*ends, estimate.kind)


def spread(estimate: Estimate) -> str:
    """Write a small estimate as (1.7 ± 0.2) × 10⁻⁴, or 1.7 ± 0.2; a skew one or a range as 1.4 [0.0, 4.1] × 10⁻⁷."""
    if estimate.value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(estimate.value)))
    value, low, high = (number / 10.0**exponent for number in (estimate.value, estimate.low, estimate.high))
    power = f" × {power_of_ten(10.0**exponent, 0)[4:]}" if exponent else ""
    below, above = value - low, high - value
    skew = max(below, above) > 1.5 * min(below, above) and round(max(below, above), 1) > 0.1
    if skew or estimate.kind == "range":
        return Estimate(value, low, high, estimate.kind).text("{:.1f}") + power
    both = f"{value:.1f} ± {(high - low) / 2:.1f}"
    return f"({both}){power}" if power else both


def change(ratio: Estimate) -> str:
    """Write by how many per cent a ratio is off 1, and half its interval."""
    if ratio.low == ratio.high == 1:
        return "0"
    if ratio.kind == "range":
        return scaled(ratio, 100, less=1).text("{:+.2f}")
    # Plus zero, for what rounds to minus zero.
    return f"{round(100 * (ratio.value - 1), 2) + 0:+.2f} ± {50 * (ratio.high - ratio.low):.2f}"


def between(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Write the least and the largest of several numbers, or the one that they are written as."""
    values = list(values)
    return " to ".join(dict.fromkeys((form.format(min(values)), form.format(max(values)))))


def is_packaged(model: str) -> bool:
    """Tell whether a model is a trained one that the book fetches with its weights."""
    return model in {family.package.title for family in registry.families().values() if family.package}


def model_said(model: Mapping[str, Any]) -> str:
    """Name a model of a run, and say of a family's name whose weights it had: those of our own, or random ones."""
    whose = {"stand-in": STAND_IN, "random": " (random weights)"}.get(model.get("weights"), "")
    return f"{model['name']}{whose}"


def weights_said(text: str) -> str:
    """Say of each packaged model, where a text first names it, how large it is and what became of its weights."""
    for package in dict.fromkeys(family.package for family in registry.families().values() if family.package):
        bits = re.search(r"\bQ(\d)", package.file)
        about = f"{package.parameters / 1e6:.0f} M, {bits[1]}-bit-rounded weights"
        # Not a hub id or a file that is named after it.
        text = re.sub(rf"(?<![\w/]){re.escape(package.title)}(?![\w-]|\.\w)", rf"\g<0> ({about})", text, count=1)
    return text


def quoted(text: str) -> str:
    """Write a text as MyST's inline code, where nothing is markup and no quotation mark is bent."""
    if not text:
        return ""
    # A fence must be longer than any run of its own character inside; one space on both sides is taken off again.
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}"


def csv_of(table: pd.DataFrame) -> bytes:
    """Write the rows of a figure or a table, in full precision."""
    return table.to_csv(index=False, lineterminator="\n").encode()
