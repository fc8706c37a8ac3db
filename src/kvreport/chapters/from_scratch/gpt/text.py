"""Text as characters: the corpus, its two parts, and the samples that are read.

A corpus is the standard library, a folder of text files, or one text file.  A file of the first two lies in the
training or in the held-out part by the hash of its name; of a single file the last tenth is held out, cut into pieces.
"""

import collections
import functools
import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbook import UserError, refusing
from kvbook.models import corpus

UNKNOWN = "\ufffd"
# A character that occurs less often than this teaches nothing and would only widen the vocabulary.
LEAST_COUNT = 100
# A single file's held-out part is cut into pieces of this many characters, which then stand for files.
PIECE = 4096


@functools.cache
def documents(name: str, part: corpus.Part) -> tuple[corpus.Document, ...]:
    """Read one part of a corpus."""
    path = Path(name).expanduser()
    if name != "stdlib" and path.is_file():
        words = f"corpus {name!r} is not UTF-8 text: name a text file, a folder, or 'stdlib'"
        with refusing(words, UnicodeDecodeError):
            text = path.read_text("utf-8")
        cut = len(text) * 9 // 10
        starts = range(cut, len(text), PIECE) if part == "held-out" else (0,) if cut else ()
        found = [
            corpus.Document(f"{path.name}:{at}", text[at : at + PIECE if part == "held-out" else cut]) for at in starts
        ]
    else:
        found = [one for one in corpus.documents(name, part) if name == "stdlib" or corpus.part_of(one.name) == part]
    if not found:
        raise UserError(f"corpus {name!r} has no {part} part: name one with more text, or 'stdlib'")
    return tuple(found)


@functools.cache
def describe(name: str, part: corpus.Part) -> dict[str, str | int]:
    """Say which text was used, as `corpus.describe` does."""
    if name == "stdlib":
        return corpus.describe(name, part)
    read = documents(name, part)
    text = "".join(document.text for document in read).encode()
    digest = hashlib.sha256(text).hexdigest()
    return {"corpus": name, "part": part, "files": len(read), "bytes": len(text), "sha256": digest}


@dataclass(frozen=True)
class Vocabulary:
    """Characters by number.

    Attributes
    ----------
    characters : str
        Each once; the first stands for every character that is not among them.
    """

    characters: str

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Vocabulary":
        """Take every character that occurs often enough, in the order of their code points."""
        counts = collections.Counter(itertools.chain.from_iterable(texts))
        return cls(UNKNOWN + "".join(sorted(c for c, n in counts.items() if n >= LEAST_COUNT and c != UNKNOWN)))

    def encode(self, text: str) -> np.ndarray:
        """Return the numbers of a text's characters, shape (n_characters,), int64."""
        # By code point: a table is looked up for a whole text at once.
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        known = np.array([ord(character) for character in self.characters], dtype=np.uint32)
        table = np.zeros(int(max(codes.max(initial=0), known.max())) + 1, dtype=np.int64)
        table[known] = np.arange(len(known))
        return table[codes]

    def encode_all(self, documents: Iterable[corpus.Document]) -> np.ndarray:
        """Encode documents as one stream."""
        return np.concatenate([self.encode(document.text) for document in documents])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of numbers."""
        return "".join(self.characters[number] for number in ids)


def samples(name: str, vocabulary: Vocabulary, n_samples: int, n_characters: int, seed: int = 0) -> list[corpus.Sample]:
    """Cut the held-out part into samples: one stretch of each file, then the next of each, and so on.

    The seed draws the order of the files and where in each the first turn begins, as `corpus.samples` does.
    """
    held_out = sorted(documents(name, "held-out"), key=lambda document: corpus.place_in_order(seed, document.name))
    encoded = [(document.name, vocabulary.encode(document.text)) for document in held_out]
    found: list[corpus.Sample] = []
    for turn in range(max(len(ids) for _, ids in encoded) // n_characters):
        for source, ids in encoded:
            if turn < (pieces := len(ids) // n_characters):
                start = corpus.start_of(seed, source, turn, pieces, n_characters)
                found.append(corpus.Sample(len(found), source, start, ids[start : start + n_characters].tolist()))
                if len(found) == n_samples:
                    return found
    raise UserError(
        f"corpus {name!r} gives {len(found)} samples of {n_characters} characters, {n_samples} were asked for: "
        f"lower n_samples to at most {len(found)}, or lower n_blocks"
    )
