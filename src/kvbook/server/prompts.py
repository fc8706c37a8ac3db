"""Prompts of an exact number of tokens: a list of word pairs, and a question about one of them.

Almost every tokenizer has one token for a common word with a space before it, so pieces are tokens, and a cut after any
piece moves no token boundary.  To answer, the model must look up a pair, so a wrong block of the cache shows.
"""

import random
from collections.abc import Sequence
from pathlib import Path

# Common ones, most of them things.
WORDS = tuple(Path(__file__).with_name("words.txt").read_text("utf-8").split())
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
