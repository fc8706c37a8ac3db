"""Numbers and names, as prose and tables write them."""

import re
from collections.abc import Iterable, Mapping, Sequence

from kvbook.models import registry

DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


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


def between(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Write the least and the largest of several numbers, or the one that they are written as."""
    values = list(values)
    return " to ".join(dict.fromkeys((form.format(min(values)), form.format(max(values)))))


def is_packaged(model: str) -> bool:
    """Tell whether a model is a trained one that the book fetches with its weights."""
    return model in {family.package.title for family in registry.families().values() if family.package}


def weights_said(text: str) -> str:
    """Say of each packaged model, where a text first names it, how large it is and what became of its weights."""
    for package in dict.fromkeys(family.package for family in registry.families().values() if family.package):
        bits = re.search(r"\bQ(\d)", package.file)
        about = f"{package.parameters / 1e6:.0f} M, {bits[1]}-bit-rounded weights"
        # Not a hub id or a file that is named after it.
        text = re.sub(rf"(?<![\w/]){re.escape(package.title)}(?![\w-]|\.\w)", rf"\g<0> ({about})", text, count=1)
    return text
