"""Does a text, cut in two, keep its token ids?  Where it does not, the cache of the first part is of other tokens."""

from dataclasses import dataclass
from pathlib import Path

from kvbook.diagnosis.outcome import BUG, SOUND
from kvbook.measuring import caches
from kvbook.models import loading


@dataclass(frozen=True)
class Seam:
    """What a look for a seam found.

    Attributes
    ----------
    lines : list of str
        To be printed.
    status : int
        0 where the prefix's ids begin the whole text's, 1 where they do not.
    """

    lines: list[str]
    status: int


def seam(model: str, prefix: str, rest: str, weights: str = "stand-in") -> Seam:
    """Check one text in two parts for a tokenizer seam."""
    tokenizer = loading.tokenizer(model, weights)
    whole = tokenizer(prefix + rest)["input_ids"]
    first = tokenizer(prefix)["input_ids"]
    shared = caches.shared_length(first, whole)
    name = Path(model).name
    if shared == len(first):
        line = (
            f"verdict   no seam: the prefix's {len(first)} ids begin the whole text's ids, so its cache can be reused"
        )
        return Seam([f"model     {name}, its tokenizer", line], SOUND)
    there = tokenizer.decode([whole[shared]]) if shared < len(whole) else ""
    line = (
        f"verdict   bug: tokenizer seam at token {shared}: alone the prefix ends with {tokenizer.decode(first[shared:])!r}, "
        f"in the whole text {there!r} stands there"
    )
    remedy = (
        f"remedy    keep of the cache the {shared} tokens that both share (kvbook.measuring.caches.reusable),\n"
        "  or put the rest's own ids behind the prefix's ids in both passes"
    )
    return Seam([f"model     {name}, its tokenizer", line, remedy], BUG)
