"""Does a text, cut in two, keep its token ids?  Where it does not, the cache of the first part is of other tokens."""

from pathlib import Path

from kvbook.diagnosis.outcome import BUG, SOUND
from kvbook.measuring import caches
from kvbook.models import loading


def check(model: str, prefix: str, rest: str, weights: str = "stand-in") -> tuple[list[str], int]:
    """Check whether a prefix's ids begin the whole text's; return lines to print, and 1 if they do not, else 0."""
    tokenizer = loading.tokenizer(model, weights)
    whole, first = (tokenizer(text)["input_ids"] for text in (prefix + rest, prefix))
    shared = caches.shared_length(first, whole)
    named = f"model     {Path(model).name}, its tokenizer"
    if shared == len(first):
        begins = f"the prefix's {shared} ids begin the whole text's ids, so its cache can be reused"
        return [named, f"verdict   no mismatch at the tokenizer boundary: {begins}"], SOUND
    # As tokens: a space alone decodes to nothing.
    alone = " ".join(map(str, tokenizer.convert_ids_to_tokens(first[shared:])))
    there = str(tokenizer.convert_ids_to_tokens(whole[shared])) if shared < len(whole) else ""
    differ = f"alone the prefix ends with {alone!r}, in the whole text {there!r} stands there"
    return [
        named, f"verdict   bug: tokenizer boundary mismatch at token {shared}: {differ}",
        f"remedy    keep what the cache holds before token {shared} (kvbook.measuring.caches.reusable),\n"
        "  or append the rest's own ids to the prefix's ids in both passes",
    ], BUG
