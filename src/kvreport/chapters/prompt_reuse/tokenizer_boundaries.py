r"""Where a text can be cut without changing its token ids.

Real text is cut at random characters; the first part is encoded alone, and its ids are compared with the beginning
of the whole text's ids.  A cut is safe when all of them are there.

Rows, one a (tokenizer, cut): see ``data/README.md``.
"""

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvbook import UserError, fingerprint, paths
from kvbook.measuring import caches
from kvbook.models import corpus, kept
from kvbook.runs import Experiment, Inputs, Writer, samples
from kvreport.chapters.prompt_reuse import PromptReuseSettings

# Characters of a file that are looked at: every cut encodes what lies before it.
_WINDOW = 1000
# The vocabularies that ship with the book.
_SHIPPED = {style: paths.MODELS / "tokenizers" / f"{style}.json" for style in ("gpt2", "llama3")}


def kind_of(text: str, cut: int) -> str:
    """Name the place of a cut by the characters on both sides."""
    before, after = text[cut - 1], text[cut]
    if before.isalnum() and after.isalnum():
        return "inside a word"
    if before in " \t" and not after.isspace():
        return "after a space"
    if after in " \t" and not before.isspace():
        return "before a space"
    if before == "\n":
        return "after a line break"
    if after.isalpha() and not before.isspace():
        return "mark before a letter"
    return "elsewhere"


def tokenizers(settings: PromptReuseSettings, models: list[dict[str, Any]]) -> dict[str, PreTrainedTokenizerBase]:
    """Load the two vocabularies that ship with the book, and the tokenizers of models that are not stand-ins."""
    found = {f"{style}-style": PreTrainedTokenizerFast(tokenizer_file=str(file)) for style, file in _SHIPPED.items()}
    for model in models:
        if model["weights"] in ("hub", "package", "gguf", "local"):
            found[model["name"]] = kept.tokenizer(model["asked_for"], samples.weights_of(settings, model["asked_for"]))
    return found


def inputs(settings: PromptReuseSettings) -> Inputs:
    """Name vocabularies, models and corpus, and refuse a corpus without a file that can be cut."""
    if not any(len(document.text) > 1 for document in corpus.documents(settings.corpus)):
        raise UserError(f"corpus {settings.corpus!r} has no file of two characters: name another folder")
    return {
        "tokenizers": {style: fingerprint.of_file(file) for style, file in _SHIPPED.items()},
        "models": samples.identities(settings, (settings.model, settings.second_model)),
        "corpus": corpus.describe(settings.corpus),
    }


def measure(settings: PromptReuseSettings, made_of: Inputs, writer: Writer) -> None:
    """Cut every file of the corpus at random characters and compare the ids."""
    by_name = tokenizers(settings, made_of["models"])
    texts = [document for document in corpus.documents(settings.corpus) if len(document.text) > 1]
    units = {document.name: (number, document) for number, document in enumerate(texts)}
    for unit, (number, document) in writer.pending(units, "cuts and their ids: file"):
        generator = np.random.default_rng([settings.seed, number])
        start = int(generator.integers(max(1, len(document.text) - _WINDOW)))
        text = document.text[start : start + _WINDOW]
        cuts = sorted(set(generator.integers(1, len(text), settings.n_positions).tolist()))
        rows = []
        for name, tokenizer in by_name.items():
            whole, *parts = tokenizer([text, *(text[:cut] for cut in cuts)], add_special_tokens=False)["input_ids"]
            for cut, part in zip(cuts, parts, strict=True):
                shared = caches.shared_length(part, whole)
                rows.append({
                    "tokenizer": name, "source": unit, "cut": cut, "place": kind_of(text, cut),
                    "prefix_tokens": len(part), "shared_tokens": shared, "safe": int(shared == len(part)),
                })
        writer.append(unit, rows)


EXPERIMENT = Experiment(
    "seams", PromptReuseSettings, inputs, measure,
    fields=frozenset({"model", "second_model", "weights", "corpus", "seed", "n_positions"}),
)
