"""Texts of many lengths, fed in uneven chunks, against the full pass: stock arithmetic and `row_invariant`.

Rows, one for each (dtype, sample, arithmetic, way): see ``data/README.md``.
"""

from collections.abc import Iterator

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer, samples, threads
from kvreport.chapters.exact_caches import ExactCachesSettings, paths
from kvreport.chapters.exact_caches.rows import ARITHMETICS

# Sizes of chunks, in the order in which they are fed: one token, odd numbers, and one either side of a power of two.
CHUNKS = (1, 7, 64, 129, 255, 300, 31, 1000)
# Tokens at the end of a text that one way feeds one by one.
_SINGLE = 32
# Rows that are compared at a time: a long text's logits in double precision would take gigabytes.
_AT_A_TIME = 256


def uneven(length: int, first: int) -> list[int]:
    """Cut a text into chunks of `CHUNKS`, beginning with another one for each `first`."""
    usable = [size for size in CHUNKS if size < length]
    sizes: list[int] = []
    while (left := length - sum(sizes)) > 0:
        sizes.append(min(usable[(first + len(sizes)) % len(usable)], left))
    return sizes


def ways(model: PreTrainedModel, length: int, first: int) -> Iterator[tuple[str, list[int], Cache]]:
    """Name every way to feed a text: the sizes of its chunks and an empty cache."""
    single = min(length - 1, _SINGLE)
    sizes, config = uneven(length, first), model.config
    yield "uneven chunks", sizes, DynamicCache(config=config)
    yield "uneven chunks, static cache", sizes, StaticCache(config=config, max_cache_len=length + 7)
    yield "prefix, then token by token", [length - single, *[1] * single], DynamicCache(config=config)


def compare(model: PreTrainedModel, ids: torch.Tensor, first: int) -> Rows:
    """Hold every way against the full pass, under both arithmetics."""
    for arithmetic in ARITHMETICS:
        with torch.inference_mode(), paths.switched(arithmetic):
            full = model(ids, use_cache=False).logits[0]
            for way, sizes, cache in ways(model, ids.shape[1], first):
                about = {"arithmetic": arithmetic, "way": way, "chunks": len(sizes)}
                yield about | _fed_against(full, model, ids, sizes, cache)


def _fed_against(full: torch.Tensor, model: PreTrainedModel, ids: torch.Tensor, sizes: list[int], cache: Cache) -> Row:
    """Feed a text in chunks and compare each chunk's logits as it comes: those of a long text are large."""
    found = []
    for part, rows in zip(ids.split(sizes, 1), full.split(sizes), strict=True):
        logits = model(part, past_key_values=cache, use_cache=True).logits[0]
        found += [paths.against(*piece) for piece in zip(rows.split(_AT_A_TIME), logits.split(_AT_A_TIME), strict=True)]
    return {
        name: (max if name == "max_abs" else sum)(one[name] for one in found)
        for name in ("rows", "equal_rows", "max_abs", "flips")
    }


def inputs(settings: ExactCachesSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    return samples.inputs(settings, [settings.model], settings.n_samples, max(settings.lengths))


def plan(settings: ExactCachesSettings, text: int) -> tuple[int, int, int]:
    """Return a text its length, its number of threads, and with which of `CHUNKS` it begins.

    All lengths come on the first number of threads, then all on the next; each time they begin with another chunk.
    """
    turn, place = divmod(text, len(settings.lengths))
    return settings.lengths[place], settings.threads[turn % len(settings.threads)], place + 3 * turn + settings.seed


def measure(settings: ExactCachesSettings, _made_of: Inputs, writer: Writer) -> None:
    """Feed every text in every way, each at its own length and number of threads."""
    longest = max(settings.lengths)
    for loaded, text in samples.each(settings, writer, [settings.model], "texts of many lengths", longest):
        length, count, first = plan(settings, text.sample.index)
        ids = text.ids[:, :length]
        with threads.using(count):
            text.keep(compare(loaded.model, ids, first), n_tokens=ids.shape[1], threads=count)


def work(settings: ExactCachesSettings) -> Work:
    """Count the passes of the model in each dtype."""
    n_texts = len(ARITHMETICS) * settings.n_samples
    mean = sum(settings.lengths) // len(settings.lengths)
    return Work(mean, 4 * n_texts, _SINGLE * n_texts, settings.dtypes)


EXPERIMENT = Experiment(
    "exact_lengths", ExactCachesSettings, inputs, measure, own_threads=True, work=work,
    fields=frozenset({"model", "weights", "device", "seed", "corpus", "n_samples", "lengths", "threads", "dtypes"}),
)
