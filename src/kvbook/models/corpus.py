"""Text for training and measuring.

The default corpus is Python's own standard library: it is on every machine that can run this book, so nothing is
downloaded. A file belongs to the training or to the held-out part by the hash of its name, so that it stays on the same
side in every Python version, also when files come and go.  ``"english"`` is prose that is installed beside it, and
``"chat"`` are conversations: questions of this book's own, in the model's chat template, with answers that a small
model wrote.  A folder of text files can be named instead.

Example
-------
>>> len(list(stdlib_files("held-out"))) > 20
True
"""

import functools
import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbook import UserError, lengths
from kvbook.models import english

Part = Literal["train", "held-out"]

STDLIB, ENGLISH, CHAT = "stdlib", "english", "chat"
# What pages call the texts of each.
POPULATIONS = {STDLIB: "Python source", ENGLISH: "English prose", CHAT: "chat"}

# The trained model's own answers, sampled at temperature 1 in fp32 by tools/write_conversations.py of commit 6741f4c.
CONVERSATIONS = Path(__file__).parent / "conversations.jsonl"

# Test suites are missing from some distributions' packages, and third-party packages are not the standard library.
_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip"}
# One file in ten is held out.
_HELD_OUT_SHARE = 10


@dataclass(frozen=True)
class Document:
    """One text file.

    Attributes
    ----------
    name : str
        Path relative to the corpus, with forward slashes.
    text : str
        Its whole content.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Sample:
    """One run of consecutive tokens of one document.

    Attributes
    ----------
    index : int
        Position in the list of samples, from 0.
    source : str
        The document's name: the unit of resampling, since samples of one file resemble each other.
    start : int
        Index of the first token within the document.
    ids : list of int
        Token ids, special tokens that the tokenizer adds by default included (only where ``start`` is 0).
    """

    index: int
    source: str
    start: int
    ids: list[int]


def part_of(name: str) -> Part:
    """Tell on which side of the split a file of the standard library lies.

    Parameters
    ----------
    name : str
        Path relative to the standard library, with forward slashes.
    """
    return "held-out" if hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_SHARE == 0 else "train"


def stdlib_files(part: Part) -> Iterator[Path]:
    """Yield the standard library's source files of one part, in name order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    named = {}
    for folder, inner, files in os.walk(root):
        # What is installed beside the standard library may be a hundred times its size: not even looked at.
        inner[:] = [name for name in inner if name not in _EXCLUDED_FOLDERS]
        sources = (Path(folder, file) for file in files if file.endswith(".py"))
        named |= {path.relative_to(root).as_posix(): path for path in sources}
    yield from (named[name] for name in sorted(named) if part_of(name) == part)


def documents(corpus: str, part: Part = "held-out", seed: int = 0) -> Iterator[Document]:
    """Yield the documents of a corpus: in name order for seed 0, in an order of its own for every other seed.

    Parameters
    ----------
    corpus : str
        ``"stdlib"``, ``"english"``, ``"chat"``, or the path of a folder of text files (searched in depth; hidden files
        and files that are not UTF-8 are passed over).
    part : {"train", "held-out"}
        Which part of the standard library; what else there is has no parts and is taken whole.
    seed : int
        Of the order; English prose is in an order of its own for seed 0 too, so that its kinds mix.

    Raises
    ------
    UserError
        When the folder does not exist.
    """
    if corpus in _INSTALLED:
        texts = _INSTALLED[corpus]()
        place = _drawn if corpus == ENGLISH else place_in_order
        yield from (Document(name, texts[name]) for name in sorted(texts, key=lambda name: place(seed, name)))
        return
    root = Path(sysconfig.get_paths()["stdlib"] if corpus == "stdlib" else corpus).expanduser()
    if not root.is_dir():
        raise UserError(f"corpus {corpus!r} is not a folder: name a folder of text files, or {', '.join(POPULATIONS)}")
    files = stdlib_files(part) if corpus == "stdlib" else root.rglob("*")
    named = {path.relative_to(root): path for path in files if path.is_file()}
    shown = {name.as_posix(): path for name, path in named.items() if not any(p.startswith(".") for p in name.parts)}
    for name in sorted(shown, key=lambda name: (place_in_order(seed, name), name)):
        try:
            text = shown[name].read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Document(name, text)


def conversations() -> dict[str, str]:
    """Read the conversations that come with this package: answers by questions."""
    turns = map(json.loads, CONVERSATIONS.read_text("utf-8").splitlines())
    return {turn["question"]: turn["answer"] for turn in turns}


_INSTALLED = {ENGLISH: english.texts, CHAT: conversations}


def encode(corpus: str, tokenizer, document: Document, **options) -> list[int]:
    """Encode a document as a user would: a conversation in the chat template, anything else as it is.

    Raises
    ------
    UserError
        When a conversation has no template to stand in.
    """
    if corpus != CHAT:
        return list(tokenizer(document.text, **options)["input_ids"])
    if tokenizer.chat_template is None:
        raise UserError("corpus 'chat': this model's tokenizer has no chat template; name another corpus")
    turns = [{"role": "user", "content": document.name}, {"role": "assistant", "content": document.text}]
    return list(tokenizer.apply_chat_template(turns, return_dict=True, **options)["input_ids"])


def opening(corpus: str, tokenizer) -> int:
    """Count the tokens that all texts of a population begin with: of chats those of the template, else none."""
    if corpus != CHAT:
        return 0
    chats = (encode(corpus, tokenizer, document) for document in documents(corpus))
    return sum(1 for _ in itertools.takewhile(lambda ids: len({*ids}) == 1, zip(*chats, strict=False)))


def _drawn(seed: int, name: str) -> bytes:
    # By a digest, so that the order of the others stays when files come and go.
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def place_in_order(seed: int, name: str) -> bytes:
    """Return what files are sorted by: nothing for seed 0, which keeps the order of names."""
    return _drawn(seed, name) if seed else b""


def start_of(seed: int, name: str, turn: int, pieces: int, length: int) -> int:
    """Say where the piece begins that a file gives in its next turn; with seed 0 the first turn takes its beginning."""
    first = int.from_bytes(_drawn(seed, f"{name} begins")) if seed else 0
    return (first + turn) % pieces * length


def describe(corpus: str, part: Part = "held-out") -> dict[str, str | int]:
    """Say which text was used, so that a reader can tell whether theirs is the same.

    Returns
    -------
    dict
        ``corpus``, ``part``, ``files``, ``bytes``, ``sha256`` of all texts in order, and for the standard library the
        ``python`` version that it came with.
    """
    digest, count, size = hashlib.sha256(), 0, 0
    for document in documents(corpus, part):
        data = document.text.encode()
        digest.update(data)
        count, size = count + 1, size + len(data)
    about: dict[str, str | int] = {"corpus": corpus, "files": count, "bytes": size, "sha256": digest.hexdigest()}
    if corpus == "stdlib":
        about |= {"part": part, "python": ".".join(map(str, sys.version_info[:3]))}
    return about


def samples(
    corpus: str, tokenizer, n_samples: int, n_tokens: lengths.Length, seed: int = 0, full: bool = False,
    named: str = "n_tokens",
) -> Iterator[Sample]:
    """Cut a corpus into samples, lazily, so that memory does not grow with their number.

    From a folder come the first `n_tokens` tokens of each of the first `n_samples` files in name order, as issue 25420
    did it; a shorter file gives a shorter sample, or none if they are to be full.  The other populations have few
    texts, so there each gives `n_tokens` tokens in the first round, the next ones in the second, and so on; every
    sample has exactly `n_tokens`, and a text with fewer gives none.  With seed 0 a
    text begins with its first tokens, with any other at a place that the seed draws.

    Where `n_tokens` is a range, a sample is the beginning of what it would be at the range's largest length, so that
    sample i has the same file, place and length whatever their number is.

    Parameters
    ----------
    corpus : str
        As for `documents`.
    tokenizer : transformers tokenizer
        Called with its defaults, so it adds the special tokens that a user's call would add.
    n_samples : int
        How many samples.
    n_tokens : int or str
        Of how many tokens each; a range such as ``"33-190"`` draws them for each sample, see `kvbook.lengths`.
    seed : int
        Of which texts are taken: of the files' order, and of where in each file the first round begins.  Of drawn
        lengths.
    full : bool
        Whether shorter files of a folder are passed over.
    named : str
        The settings to lower where files are too short, for the refusal.

    Raises
    ------
    UserError
        When the corpus holds fewer samples than asked for.
    """
    made = 0
    longest = lengths.longest(n_tokens)
    if corpus in POPULATIONS:
        encoded: list[tuple[str, list[int]]] = []
        # A file is encoded when the first round reaches it: most runs ask for few samples.
        for turn in itertools.count():
            for name, ids in encoded if turn else _encoded(corpus, tokenizer, encoded, seed):
                if turn < (pieces := len(ids) // longest):
                    start = start_of(seed, name, turn, pieces, longest)
                    yield Sample(made, name, start, ids[start : start + lengths.drawn(n_tokens, made, seed)])
                    made += 1
                    if made == n_samples:
                        return
            if turn + 1 >= max((len(ids) // longest for _, ids in encoded), default=0):
                break
    else:
        for document in documents(corpus, seed=seed):
            length = lengths.drawn(n_tokens, made, seed)
            ids = encode(corpus, tokenizer, document, truncation=True, max_length=length)
            # One token has no prefix to cache.
            if len(ids) >= (length if full else 2):
                yield Sample(made, document.name, 0, ids)
                made += 1
                if made == n_samples:
                    return
    at_most, more = ("", f"lower {named}") if full or corpus in POPULATIONS else ("at most ", "add files")
    lower = f"ask for at most {made}, or {more}" if made else f"{more}, or name longer texts"
    gives = f"corpus {corpus!r} gives {made} sample{'s' * (made != 1)} of {at_most}{lengths.said(n_tokens)} tokens"
    raise UserError(f"{gives}, {n_samples} were asked for: {lower}")


def _encoded(corpus: str, tokenizer, kept: list[tuple[str, list[int]]], seed: int) -> Iterator[tuple[str, list[int]]]:
    """Encode documents one after the other, and keep them for the rounds that follow."""
    # A chat template may be another one at the next call.
    whole = encode if corpus == CHAT else _encoded_once
    for document in documents(corpus, seed=seed):
        kept.append((document.name, whole(corpus, tokenizer, document, verbose=False)))
        yield kept[-1]


# Once for all experiments that measure on a document.
_encoded_once = functools.lru_cache(maxsize=200)(encode)
