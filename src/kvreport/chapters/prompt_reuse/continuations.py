"""The forum thread's second example: greedy decoding with a prefix's cache and without.

Cases:

``thread``
    The thread's prefix and prompts; its text is encoded whole, its cache was filled with the prefix alone.
``documented``
    The same with a space at the prefix's end, as the library's documentation has it.
``joined word``
    The thread's second prompt with another first word, one that this vocabulary joins with the prefix's full stop, as
    the document's vocabularies join the thread's own words.  Where no such word exists, the case is absent.
``continued ids``
    The texts of ``thread`` and ``joined word``, but the prompt's ids are put after the prefix's ids: the cut lies
    between two ids.
``chat template``
    The thread's prefix as a system's turn and its prompts as a user's, in the model's own chat template.  The cache was
    filled with the first turn, after which the ids of every template go on.  Absent where a model has no template.
``whole prompt``
    The cache was filled with the whole prompt.
``corpus``
    Texts of the corpus, cut in two at a random character.
``before the space``
    The texts of ``documented``, cut one character earlier, so that the space begins the prompt.

The experiment ``reused_questions`` has further questions after the same prefix: as ``documented``, ``before the
space``, and in the ``chat template``.

Ways: without a cache; with the prefix's cache as it is; with the longest prefix of it that the prompt's ids share
(`kvbook.measuring.caches.reusable`).

A third experiment asks where a text can be cut without changing its token ids.  Real text is cut at random characters;
the first part is encoded alone, and its ids are compared with the beginning of the whole text's ids.  A cut is safe
when all of them are there.

Rows of both, one a (model, dtype, case, item, way, cache, step), and of the third one a (tokenizer, cut): see
``data/README.md``.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import ModelOutput

from kvbook import UserError, fingerprint, paths
from kvbook.measuring import caches, choosing
from kvbook.models import corpus, kept, loading
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.prompt_reuse import PromptReuseSettings
from kvreport.chapters.prompt_reuse import rows as named
from kvreport.publishing import documents

# Short questions, one a line, written for this book.
QUESTIONS = paths.DATA / "questions.txt"
# How many words to try that the vocabulary joins with a full stop.
_N_WORDS = 8

# Texts that are written for the thread's examples in a dtype, more or less, in all ways.
_POSTED_TEXTS = 46
# The same for each further question.
_QUESTION_TEXTS = 9
# Tokens of a text before and after the cut.
_BEFORE, _AFTER = 32, 12
# Characters of a file that are looked at: every cut encodes what lies before it.
_WINDOW = 1000
# The vocabularies that ship with the book.
_SHIPPED = {style: paths.MODELS / "tokenizers" / f"{style}.json" for style in ("gpt2", "llama3")}


class Item(NamedTuple):
    """One text in two parts.

    Attributes
    ----------
    case : str
        Which kind of example.
    name : str
        Which one of them.
    prefix_ids, ids : list of int
        What the cache is filled with, and the whole prompt.
    """

    case: str
    name: str
    prefix_ids: list[int]
    ids: list[int]


Items = Callable[[PromptReuseSettings, PreTrainedTokenizerBase], Iterator[Item]]


def joined_words(tokenizer: PreTrainedTokenizerBase, stop: str) -> list[str]:
    """List words that a vocabulary joins with the full stop before them, the most frequent first."""
    vocabulary = tokenizer.get_vocab()
    # A vocabulary is in the order in which its merges were learned, so low ids are frequent.
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return [token[1:] for token in tokens if re.fullmatch(rf"{re.escape(stop)}[A-Za-z]{{3,}}", token)]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, **options) -> list[int]:
    return list(tokenizer(text, **options)["input_ids"])


def questions(settings: PromptReuseSettings) -> list[str]:
    """List further questions, which the thread does not have; seeds share none."""
    listed, begin = QUESTIONS.read_text("utf-8").splitlines(), settings.seed * settings.n_prompts
    if begin + settings.n_prompts > len(listed):
        raise UserError(
            f"n_prompts = {settings.n_prompts} with seed {settings.seed}: {QUESTIONS.name} has {len(listed)} questions;"
            " lower either"
        )
    return listed[begin : begin + settings.n_prompts]


def question_items(settings: PromptReuseSettings, tokenizer: PreTrainedTokenizerBase) -> Iterator[Item]:
    """Encode the further questions after the thread's prefix, cut at two places, and in the chat template."""
    texts = documents.published(named.DOCUMENT)["generation"]
    for question in questions(settings):
        whole = _encode(tokenizer, texts["documented_prefix"] + question)
        yield Item(named.DOCUMENTED, question, _encode(tokenizer, texts["documented_prefix"]), whole)
        yield Item(named.SPACE, question, _encode(tokenizer, texts["prefix"]), whole)
        yield from _chat_items(tokenizer, texts["prefix"], {question: question})


def posted_items(tokenizer: PreTrainedTokenizerBase) -> Iterator[Item]:
    """Encode the thread's and the documentation's examples, variations, and a cache as long as the prompt."""
    texts = documents.published(named.DOCUMENT)["generation"]
    prefix, documented = (_encode(tokenizer, texts[key]) for key in ("prefix", "documented_prefix"))

    def continued(name: str, prompt: str) -> Item:
        return Item(named.CONTINUED, name, prefix, prefix + _encode(tokenizer, prompt, add_special_tokens=False))

    for number, prompt in enumerate(texts["prompts"]):
        yield Item(named.THREAD, str(number), prefix, _encode(tokenizer, texts["prefix"] + prompt))
        yield Item(named.DOCUMENTED, str(number), documented, _encode(tokenizer, texts["documented_prefix"] + prompt))
        yield continued(str(number), prompt)
    after = texts["prompts"][-1].partition(" ")[2]
    for word in joined_words(tokenizer, texts["prefix"][-1])[:_N_WORDS]:
        whole = _encode(tokenizer, f"{texts['prefix']}{word} {after}")
        # A tokenizer that cuts before the word in any case has the token for other uses.
        if caches.shared_length(prefix, whole) < len(prefix):
            yield Item(named.JOINED, word, prefix, whole)
            yield continued(word, f"{word} {after}")
    yield from _chat_items(tokenizer, texts["prefix"], dict(zip(named.OWN, texts["prompts"], strict=True)))
    whole = _encode(tokenizer, texts["prefix"] + texts["prompts"][0])
    yield Item(named.WHOLE, "0", whole, whole)


def _chat_items(tokenizer: PreTrainedTokenizerBase, prefix: str, prompts: dict[str, str]) -> Iterator[Item]:
    if tokenizer.chat_template is None:
        return

    def encode(turns: list[dict[str, str]], **options) -> list[int]:
        return list(tokenizer.apply_chat_template(turns, return_dict=True, **options)["input_ids"])

    system = {"role": "system", "content": prefix}
    try:
        cached = encode([system])
    # A template that knows no system's turn raises whatever it likes.
    except Exception:
        return
    for name, prompt in prompts.items():
        whole = encode([system, {"role": "user", "content": prompt}], add_generation_prompt=True)
        yield Item(named.CHAT, name, cached, whole)


def _posted_and_corpus_items(settings: PromptReuseSettings, tokenizer: PreTrainedTokenizerBase) -> Iterator[Item]:
    """Cut samples of the corpus in two too, each at a random character; refuses a corpus that is too small."""
    yield from posted_items(tokenizer)
    generator = np.random.default_rng(settings.seed)
    for sample in corpus.samples(settings.corpus, tokenizer, settings.n_samples, _BEFORE + _AFTER, settings.seed):
        text = tokenizer.decode(sample.ids, skip_special_tokens=True)
        cut = int(generator.integers(len(text) // 2, len(text)))
        name = f"{sample.source}:{sample.start}"
        yield Item(named.CORPUS, name, _encode(tokenizer, text[:cut]), _encode(tokenizer, text))


def fill(model: PreTrainedModel, ids: list[int], kind: str, room: int) -> Cache:
    """Fill a fresh cache with token ids."""
    cache = caches.recording(model.config) if kind == "dynamic" else caches.make(kind, model.config, room)
    return model(torch.tensor([ids], device=model.device), past_key_values=cache, use_cache=True).past_key_values


def generate(model: PreTrainedModel, ids: list[int], n_new_tokens: int, cache: Cache | None = None) -> ModelOutput:
    """Write greedily with the library's `generate`, as the thread does."""
    prompt = torch.tensor([ids], device=model.device)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=n_new_tokens,
        # The kind of cache is one question, compilation another: on a GPU a static cache would bring both.
        return_dict_in_generate=True, output_logits=True, disable_compile=True, past_key_values=cache,
    )


def continuations(model: PreTrainedModel, item: Item, n_new_tokens: int) -> Iterator[tuple[str, str, ModelOutput]]:
    """Continue one item in every way that applies to it."""
    yield named.NO_REUSE, "", generate(model, item.ids, n_new_tokens)
    # The prompt may be fed a second time on top of a cache that holds it.
    room = len(item.prefix_ids) + len(item.ids) + n_new_tokens
    both = item.case in (named.THREAD, named.CHAT, named.WHOLE) and item.name in named.OWN
    for kind in ("dynamic", "static") if both else ("dynamic",):
        filled = fill(model, item.prefix_ids, kind, room)
        # As the thread does: the filled cache is kept, every prompt gets a copy.
        yield named.AS_IS, kind, generate(model, item.ids, n_new_tokens, copy.deepcopy(filled))
        # A static window cannot be cut back.
        if item.case != named.CONTINUED and (kind == "dynamic" or not any(filled.is_sliding)):
            reusable = caches.reusable(filled, item.prefix_ids, item.ids)
            yield named.SHARED, kind, generate(model, item.ids, n_new_tokens, reusable)


def _inputs(settings: PromptReuseSettings, items_of: Items, **more: Any) -> Inputs:
    """Name the models and texts, and refuse texts that are longer than a model's context."""
    models = samples.identities(settings, (settings.model, settings.second_model))
    for model in models:
        tokenizer = kept.tokenizer(model["asked_for"], samples.weights_of(settings, model["asked_for"]))
        longest = max((len(item.ids) for item in items_of(settings, tokenizer)), default=0)
        loading.check_length(model, 2 * longest + settings.n_new_tokens, "n_new_tokens")
    return {"texts": documents.published(named.DOCUMENT)["generation"], "models": models} | more


def inputs(settings: PromptReuseSettings) -> Inputs:
    """Name the models, the thread's texts and the corpus, and refuse what cannot be run."""
    return _inputs(settings, _posted_and_corpus_items, corpus=corpus.describe(settings.corpus))


def inputs_questions(settings: PromptReuseSettings) -> Inputs | None:
    """Name the models and the questions; None where none is asked for."""
    return _inputs(settings, question_items, questions=questions(settings)) if settings.n_prompts else None


def _measure(items_of: Items, settings: PromptReuseSettings, made_of: Inputs, writer: Writer) -> None:
    """Continue every text in every way, for all models and dtypes; the corpus in the first dtype alone."""
    for model, dtype in itertools.product(made_of["models"], settings.dtypes):
        loaded = samples.load(settings, model["asked_for"], dtype)
        units = {
            f"{model['asked_for']}|{dtype}|{item.case}|{item.name}": item
            for item in items_of(settings, loaded.tokenizer)
            # Cut texts ask about ids, which have no dtype: the first one is enough.
            if item.case != named.CORPUS or dtype == settings.dtypes[0]
        }
        for unit, item in writer.pending(units, f"reuse of a prompt's cache, {loaded.name}, {dtype}: text"):
            about = loaded.about | {"case": item.case, "item": item.name}
            found = continuations(loaded.model, item, settings.n_new_tokens)
            writer.keep(unit, about, (row for one in found for row in _rows(loaded.tokenizer, item, *one)))


def _rows(tokenizer: PreTrainedTokenizerBase, item: Item, way: str, kind: str, output: ModelOutput) -> Rows:
    shared, n_prefix, n_prompt = caches.shared_length(item.prefix_ids, item.ids), len(item.prefix_ids), len(item.ids)
    held = {named.NO_REUSE: 0, named.AS_IS: n_prefix, named.SHARED: min(shared, n_prompt - 1)}[way]
    tokens, cache_length = output.sequences[0, n_prompt:].tolist(), caches.length(output.past_key_values)
    # The cache's last token, and what the prompt has in its place.
    end, there = item.prefix_ids[-1], item.ids[n_prefix - 1]
    about = {
        "way": way, "cache": kind, "prefix_tokens": n_prefix, "prompt_tokens": n_prompt, "shared_tokens": shared,
        "prefix_end": tokenizer.decode([end]), "prefix_end_id": end,
        "prompt_there": tokenizer.decode([there]), "prompt_there_id": there,
        # The last token written is never fed.
        "fed_tokens": cache_length - held - (len(tokens) - 1), "cache_length": cache_length,
    }
    for step, (token, logits) in enumerate(zip(tokens, output.logits, strict=True)):
        margin = choosing.margin(logits[0]).item()
        yield about | {"step": step, "token": token, "text": tokenizer.decode([token]), "margin": margin}


def work(settings: PromptReuseSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts = _POSTED_TEXTS + 3 * settings.n_samples / len(settings.dtypes)
    return Work(_BEFORE + _AFTER, 2 * n_texts, n_texts * settings.n_new_tokens, settings.dtypes)


def work_questions(settings: PromptReuseSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts = _QUESTION_TEXTS * settings.n_prompts
    return Work(_BEFORE, 2 * n_texts, n_texts * settings.n_new_tokens, settings.dtypes)


_FIELDS = frozenset(PromptReuseSettings.model_fields) - {"n_positions"}
EXPERIMENT = Experiment(
    "prompt_reuse", PromptReuseSettings, inputs, lambda *asked: _measure(_posted_and_corpus_items, *asked),
    fields=_FIELDS - {"n_prompts"}, work=work,
)
REUSED_QUESTIONS = Experiment(
    "reused_questions", PromptReuseSettings, inputs_questions, lambda *asked: _measure(question_items, *asked),
    fields=_FIELDS - {"n_samples", "corpus"}, work=work_questions,
)


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


def inputs_of_seams(settings: PromptReuseSettings) -> Inputs:
    """Name vocabularies, models and corpus, and refuse a corpus without a file that can be cut."""
    if not any(len(document.text) > 1 for document in corpus.documents(settings.corpus)):
        raise UserError(f"corpus {settings.corpus!r} has no file of two characters: name another folder")
    return {
        "tokenizers": {style: fingerprint.of_file(file) for style, file in _SHIPPED.items()},
        "models": samples.identities(settings, (settings.model, settings.second_model)),
        "corpus": corpus.describe(settings.corpus),
    }


def measure_seams(settings: PromptReuseSettings, made_of: Inputs, writer: Writer) -> None:
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


SEAMS = Experiment(
    "seams", PromptReuseSettings, inputs_of_seams, measure_seams,
    fields=frozenset({"model", "second_model", "weights", "corpus", "seed", "n_positions"}),
)
