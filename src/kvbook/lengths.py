"""Lengths of texts: one number of tokens for all, or a range from which each text draws its own.

A kernel that works in blocks treats a length that fills a block otherwise than its neighbours, so that one length can
show what hardly any other does.  A range is written as text, ``"33-190"``, and both ends belong to it.

Example
-------
>>> bounds("33-190"), bounds(64)
((33, 190), (64, 64))
"""

import hashlib
import re
from typing import Any

# One number, or both ends of a range.
Length = int | str

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def parsed(value: Any, at_least: int = 1) -> Length:
    """Read a number or a range, as a parameter may come; what is neither, is empty or begins too low is a ValueError.

    A range of one length is that number.
    """
    number = isinstance(value, int) and not isinstance(value, bool)
    match = _RANGE.fullmatch(str(value)) if number or isinstance(value, str) else None
    if not match:
        raise ValueError("give a number of tokens, or a range of them such as 33-190")
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        raise ValueError(f"a range goes from its least to its largest number: {high}-{low}")
    if low < at_least:
        raise ValueError(f"at least {at_least} tokens are needed")
    return low if low == high else f"{low}-{high}"


def bounds(length: Length) -> tuple[int, int]:
    """Return the least and the largest number of tokens."""
    low, _, high = str(length).partition("-")
    return int(low), int(high or low)


def longest(length: Length) -> int:
    """Return the largest number of tokens."""
    return bounds(length)[1]


def middle(length: Length) -> int:
    """Return the number of tokens that texts have on average, rounded."""
    return round(sum(bounds(length)) / 2)


def plus(length: Length, more: int) -> Length:
    """Make every length longer; each text still draws what it drew, and so much more."""
    low, high = bounds(length)
    return parsed(f"{low + more}-{high + more}")


def drawn(length: Length, index: int, seed: int = 0) -> int:
    """Draw the length of one text by its number; how many texts there are makes no difference."""
    low, high = bounds(length)
    digest = hashlib.sha256(f"{seed} length {index}".encode()).digest()
    return low + int.from_bytes(digest[:8]) % (high - low + 1)


def said(length: Length) -> str:
    """Write it in words, without its unit: ``64``, or ``33 to 190``."""
    return " to ".join(map(str, dict.fromkeys(bounds(length))))
