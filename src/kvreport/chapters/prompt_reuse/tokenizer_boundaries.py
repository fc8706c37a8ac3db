r"""Where a text can be cut without changing its token ids.

Real text is cut at random characters; the first part is encoded alone, and its ids are held against the beginning of
the whole text's ids.  A cut is safe when all of them are there.

Rows, one a (tokenizer, cut): see ``data/README.md``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from kvbook import fingerprint, paths, progress
from kvbook.errors import UserError
from kvbook.measuring import caches
from kvbook.models import corpus, loading
from kvbook.runs import records, samples
from kvbook.runs.experiment import Experiment
from kvreport.chapters.prompt_reuse import split_keys
from kvreport.chapters.prompt_reuse.settings import PromptReuseSettings

# Characters of a file that are looked at: every cut encodes what lies before it.
_WINDOW = 1000
_STYLES = ("gpt2", "llama3")

Encoder = Callable[[list[str]], list[list[int]]]


def kind_of(text: str, cut: int) -> str:
    """Name the place of a cut by the characters on both sides."""
    before, behind = text[cut - 1], text[cut]
    if before.isalnum() and behind.isalnum():
        return "inside a word"
    if before in " \t" and not behind.isspace():
        return "after a space"
    if behind in " \t" and not before.isspace():
        return "before a space"
    if before == "\n":
        return "after a line break"
    if behind.isalpha() and not before.isspace():
        return "mark before a letter"
    return "elsewhere"


def _vocabulary(style: str) -> Path:
    """Give the file of a vocabulary that ships with the book."""
    return paths.MODELS / "tokenizers" / f"{style}.json"


def encoders(settings: PromptReuseSettings, models: list[dict[str, Any]]) -> dict[str, Encoder]:
    """Give the two vocabularies that ship with the book, and the tokenizers of models that are not stand-ins."""

    def of_bpe(bpe: Tokenizer) -> Encoder:
        return lambda texts: [coded.ids for coded in bpe.encode_batch(texts, add_special_tokens=False)]

    found = {f"{style}-style": of_bpe(Tokenizer.from_file(str(_vocabulary(style)))) for style in _STYLES}
    for model in models:
        if model["weights"] in ("hub", "package", "gguf", "local"):
            own = loading.tokenizer(model["asked_for"], samples.weights_of(settings, model["asked_for"]))
            found[model["name"]] = lambda texts, own=own: own(texts, add_special_tokens=False)["input_ids"]
    return found


def inputs(settings: PromptReuseSettings) -> dict[str, Any]:
    """Name vocabularies, models and corpus, and refuse a corpus without a file that can be cut."""
    if not any(len(document.text) > 1 for document in corpus.documents(settings.corpus)):
        raise UserError(f"corpus {settings.corpus!r} has no file of two characters: name another folder")
    return {
        "tokenizers": {style: fingerprint.of_file(_vocabulary(style)) for style in _STYLES},
        "models": split_keys.identities(settings),
        "corpus": corpus.describe(settings.corpus),
    }


def measure(settings: PromptReuseSettings, made_of: dict[str, Any], writer: records.Writer) -> None:
    """Cut every file of the corpus at random characters and compare the ids."""
    named = encoders(settings, made_of["models"])
    texts = [document for document in corpus.documents(settings.corpus) if len(document.text) > 1]
    for number, document in enumerate(progress.track(texts, label="cuts and their ids: file")):
        if document.name in writer.done:
            continue
        generator = np.random.default_rng([settings.seed, number])
        start = int(generator.integers(max(1, len(document.text) - _WINDOW)))
        text = document.text[start : start + _WINDOW]
        cuts = sorted(set(generator.integers(1, len(text), settings.n_positions).tolist()))
        rows = []
        for name, encode in named.items():
            whole, *parts = encode([text, *(text[:cut] for cut in cuts)])
            rows += [_row(name, document.name, text, cut, part, whole) for cut, part in zip(cuts, parts, strict=True)]
        writer.append(document.name, rows)


def _row(name: str, source: str, text: str, cut: int, part: list[int], whole: list[int]) -> dict[str, Any]:
    shared = caches.shared_length(part, whole)
    return {
        "tokenizer": name,
        "source": source,
        "cut": cut,
        "place": kind_of(text, cut),
        "prefix_tokens": len(part),
        "shared_tokens": shared,
        "safe": int(shared == len(part)),
    }


EXPERIMENT = Experiment(
    "seams",
    PromptReuseSettings,
    inputs,
    measure,
    fields=frozenset({"model", "second_model", "weights", "corpus", "seed", "n_positions"}),
)
