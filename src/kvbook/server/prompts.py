"""Prompts of an exact number of tokens: a list of word pairs, and a question about one of them.

Almost every tokenizer has one token for a common word with a space before it, so pieces are tokens, and a cut after any
piece moves no token boundary.  To answer, the model must look up a pair, so a wrong block of the cache shows.
"""

import random
from collections.abc import Sequence

_COMMON = """
river stone house green apple lamp table window garden paper winter summer silver golden yellow orange bread water
coffee sugar butter cheese honey salt pepper rice corn bean fish bird horse sheep mouse rabbit tiger lion bear wolf
mountain valley forest desert island ocean beach lake bridge road street market school church castle tower village
city farm doctor teacher farmer soldier sailor artist writer singer dancer painter king queen prince knight book
letter picture music song story poem dance game ball wheel wagon train ship boat plane engine iron copper steel
glass wood leather cotton silk rope chain nail hammer knife fork spoon plate bottle basket box clock mirror candle
carpet chair bed door roof wall floor stairs kitchen morning evening night spring autumn storm cloud rain snow wind
fire smoke thunder north south east west circle square triangle line corner red blue black white brown pink purple
gray hand foot head heart shoulder finger nose mouth tongue shirt coat hat shoe dress ring pocket button dream hope
fear anger joy peace war truth secret promise
"""
WORDS = tuple(_COMMON.split())
_LINKS = (" means", ",")


def opening() -> str:
    """Draw a first line that no earlier run has had: always three pieces, so it shifts nothing."""
    return " ".join(("", *random.SystemRandom().sample(WORDS, 3)))


def pieces(first: str, seed: int, count: int) -> list[str]:
    """List the pieces of a prefix, the first line's included."""
    drawn = random.Random(f"{first} {seed}")
    made = [f" {word}" for word in first.split()]
    while len(made) < count:
        words = drawn.sample(WORDS, len(WORDS) // 2 * 2)
        for key, meaning in zip(words[::2], words[1::2], strict=True):
            made += [f" {key}", _LINKS[0], f" {meaning}", _LINKS[1]]
    return made[:count]


def question(prefix: Sequence[str], share: float, begin: str = " Now") -> str:
    """Ask for the meaning of a word at this share of a prefix; questions that begin differently share no piece."""
    keys = [prefix[place - 1] for place, piece in enumerate(prefix) if piece == _LINKS[0]]
    # A prefix too short for a pair has its first line.
    key = keys[min(int(share * len(keys)), len(keys) - 1)] if keys else prefix[0]
    return begin + key + _LINKS[0]


def edited(prefix: Sequence[str], share: float = 0.6) -> list[str]:
    """Exchange one word at this share of a prefix."""
    place, changed = int(share * len(prefix)), list(prefix)
    while changed[place] in _LINKS:
        place -= 1
    words = [f" {word}" for word in WORDS]
    changed[place] = words[(words.index(changed[place]) + 1) % len(words)]
    return changed
