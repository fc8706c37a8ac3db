"""What experiments on sampled texts share: what is refused beforehand, and the texts that are still to be measured."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from kvbook import lengths, progress
from kvbook.measuring import caches, costs
from kvbook.models import corpus, kept, loading, packages, placement, registry, streamed
from kvbook.runs import records
from kvbook.settings import Settings, TextSettings, memory_of


class Text(NamedTuple):
    """One text that is to be measured.

    Attributes
    ----------
    unit : str
        Name of its rows in the run.
    sample : Sample
        Where it comes from.
    ids : Tensor of int64, shape (1, seq_len)
        Where the model is.
    about : dict
        ``model``, ``weights``, ``dtype``, ``sample`` and ``source``, for its rows.
    writer : Writer
        Of the run.
    """

    unit: str
    sample: corpus.Sample
    ids: torch.Tensor
    about: dict[str, Any]
    writer: records.Writer

    def keep(self, rows: Iterable[dict[str, Any]], **more: Any) -> None:
        """Measure in inference mode what is to be iterated over, and write its rows, `more` in each of them."""
        self.writer.keep(self.unit, self.about | more, rows)


def weights_of(settings: Settings, name: str) -> str:
    """Choose the weights of one model: those asked for; a further family without a package stays a stand-in."""
    further = name != settings.model and name in registry.families()
    if settings.weights == "package" and further and name not in packages.with_package():
        return "stand-in"
    return settings.weights


# Takes settings and a model's name.
WeightsOf = Callable[[Settings, str], str]


def identities(
    settings: TextSettings, names: Iterable[str], n_tokens: lengths.Length = 1, choose: WeightsOf = weights_of
) -> list[dict[str, Any]]:
    """Name the models of a run, each once, and refuse what cannot be run before anything is."""
    placement.check(settings.device, settings.dtypes)
    models = []
    for name in dict.fromkeys(names):
        weights = choose(settings, name)
        model = loading.identify(name, weights, settings.seed) | {"asked_for": name}
        loading.check_length(model, lengths.longest(n_tokens))
        check_memory(settings, name, weights, settings.dtypes, lengths.longest(n_tokens))
        models.append(model)
    return models


def check_memory(settings: Settings, name: str, weights: str, dtypes: Iterable[str], n_tokens: int) -> None:
    """Refuse a model of which a part is larger than the limit of memory, if there is one."""
    if (memory := memory_of(settings)) is not None:
        config = loading.config_of(name, weights)
        for dtype in dtypes:
            if kept.streams(config, dtype, memory):
                streamed.check(config, settings.device)
                costs.check_streamed(config, [dtype], n_tokens, memory)


def check_corpus(settings: TextSettings, names: Iterable[str], n_samples: int, n_tokens: lengths.Length) -> None:
    """Cut the texts once before a folder is made, so that a corpus which is too small leaves none."""
    for name in names:
        tokenizer = kept.tokenizer(name, weights_of(settings, name))
        for _ in corpus.samples(settings.corpus, tokenizer, n_samples, n_tokens, settings.seed):
            pass


def prompts(
    settings: Settings, texts: str, n_samples: int, n_tokens: int, named: str = "prompt_tokens"
) -> list[corpus.Sample]:
    """Cut samples of one length, as a batch needs, by the model's tokenizer; `named` are the settings of that length.

    Shorter files are passed over.
    """
    tokenizer = kept.tokenizer(settings.model, settings.weights)
    return list(corpus.samples(texts, tokenizer, n_samples, n_tokens, settings.seed, full=True, named=named))


def inputs(
    settings: TextSettings, names: Iterable[str], n_samples: int, n_tokens: lengths.Length, cut: bool = False
) -> dict[str, Any]:
    """Name the models and the corpus of a run, and refuse what cannot be run, or have its caches cut back."""
    names = tuple(dict.fromkeys(names))
    models = identities(settings, names, n_tokens)
    for name in names if cut else ():
        caches.recording(loading.config_of(name, weights_of(settings, name)))
    check_corpus(settings, names, n_samples, n_tokens)
    return {"models": models, "corpus": corpus.describe(settings.corpus)}


def load(
    settings: Settings, name: str, dtype: str, attention: str | None = None, quantization: str = "none",
    choose: WeightsOf = weights_of,
) -> loading.Loaded:
    """Load a model as the settings ask for it, or share the one that is there."""
    return kept.load(
        name, weights=choose(settings, name), dtype=dtype, device=settings.device, attention=attention,
        seed=settings.seed, quantization=quantization, memory=memory_of(settings),
    )


def pending(
    settings: TextSettings, writer: records.Writer, loaded: loading.Loaded, case: str, label: str,
    n_samples: int | None = None, n_tokens: lengths.Length | None = None,
) -> Iterator[Text]:
    """Go through the texts of one case that the run does not hold yet, saying how far.

    As many and as long as the settings say, unless it is said here.

    One at a time, also where they have one length: texts that share a pass share its products, which then have more
    rows, and the number of rows decides in which order a product adds up.
    """
    n_samples, n_tokens = n_samples or settings.n_samples, n_tokens or settings.n_tokens
    samples = corpus.samples(settings.corpus, loaded.tokenizer, n_samples, n_tokens, settings.seed)
    for sample in progress.track(samples, n_samples, f"{label}: sample"):
        if (unit := f"{case}|{sample.index}") in writer.done:
            continue
        about = loaded.about | {"sample": sample.index, "source": sample.source}
        yield Text(unit, sample, torch.tensor([sample.ids], device=loaded.model.device), about, writer)


def each(
    settings: TextSettings, writer: records.Writer, names: Iterable[str], label: str,
    n_tokens: lengths.Length | None = None,
) -> Iterator[tuple[loading.Loaded, Text]]:
    """Go through the pending texts of every model in every dtype."""
    todo = list(itertools.product(names, settings.dtypes))
    for name, dtype in progress.track(todo, label=f"{label}: model and dtype"):
        loaded = load(settings, name, dtype)
        for text in pending(settings, writer, loaded, f"{name}|{dtype}", loaded.name, n_tokens=n_tokens):
            yield loaded, text
