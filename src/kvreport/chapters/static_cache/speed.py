"""Tokens a second by kind of cache and by compilation, apart: load, compile, prefill and decode.

``generate`` is called as the document calls it, with as many new tokens at least as at most; and one loop
(`kvbook.measuring.decoding`) decodes in every way, so that two ways differ in nothing else.  Speed does not depend on
what the weights have learnt, so the true shape with random weights stands for the document's model.

Without a cache a step's time depends on its length alone, and takes longest; it is measured at some lengths, on the
tokens that the cached way wrote.  Rows, one a (engine, way, repeat, phase, step): see ``data/README.md``.
"""

import itertools
from collections import Counter

import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from kvbook import UserError, progress
from kvbook.measuring import decoding, timing
from kvbook.measuring.decoding import Way
from kvbook.models import kept, loading, placement
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer
from kvreport.chapters.static_cache import StaticCacheSettings, subject
from kvreport.chapters.static_cache import rows as named

# Lengths at which a step without a cache is measured.
_N_LENGTHS = 9
# Tokens of `generate`'s first call on a CPU.
_FEW = 4
# Steps that come before the times: compilation, buffers, the code paths of a fresh graph.
_FIRST_STEPS = 2
_OPTIONS = {"none": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}}


def ways(settings: StaticCacheSettings) -> list[Way]:
    """List the ways of the loop: every cache, eager and compiled; and the one-row form, where it can be compiled."""
    # Without a cache a graph takes longer to compile than so few tokens take to write.
    kinds = {False: named.KINDS, True: named.KINDS if settings.n_new_tokens > _N_LENGTHS else named.KINDS[1:]}
    found = [Way(cache, compiled) for compiled, caches in kinds.items() for cache in caches]
    if settings.scope == "layer":
        found += [Way("static", compiled=True, one_row=True, large_pages=pages) for pages in (False, True)]
    return found


def inputs(settings: StaticCacheSettings) -> Inputs:
    """Name the timed model, and refuse what cannot be run."""
    made_of = subject.inputs(settings)
    n_prompt = len(kept.tokenizer(settings.model, subject.weights_of(settings))(settings.prompt)["input_ids"])
    loading.check_length(made_of["models"][0], n_prompt + settings.n_new_tokens, "n_new_tokens")
    return made_of


def _start_compiler(device: torch.device) -> None:
    """Have the compiler do what it does once in a process: it tries out the processor and reads its own sources."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(1, device=device))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        why = f"torch cannot compile here ({type(error.inner_exception).__name__}): on a CPU"
        raise UserError(f"{why} it takes g++ (Debian: apt-get install g++), and a path without spaces") from None


def graphs_compiled() -> int:
    """Count the graphs that torch has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def measure(settings: StaticCacheSettings, _made_of: Inputs, writer: Writer) -> None:
    """Time loading, compilation, prefill and decoding apart."""
    if "all" in writer.done:
        return
    device = placement.device_of(settings.device)
    loaded, load_s = timing.timed(lambda: subject.load(settings), device)
    ids = subject.prompt(settings, loaded)
    load = _row(Way("none"), 0, named.LOAD, 0, 0, load_s) | {"engine": "", "cache": "", "n_steps": 0}
    # What an earlier experiment of this process compiled must neither be found nor count against the limit.
    torch.compiler.reset()
    # Charged to nobody, least of all to the way that comes first.
    _start_compiler(device)
    writer.keep("all", loaded.about, itertools.chain([load], _timed(loaded.model, ids, settings)))
    torch.compiler.reset()


def _timed(model: PreTrainedModel, ids: torch.Tensor, settings: StaticCacheSettings) -> Rows:
    """Warm everything up, then give `generate` and the loop their turns, in an order that turns with every repeat."""
    timed = _Timed(model, ids, settings)
    # For buffers a few tokens do; on a GPU a static cache sets off a compilation, which depends on the length.
    few = min(_FEW, settings.n_new_tokens) if model.device.type == "cpu" else settings.n_new_tokens
    for cache in named.KINDS[1:]:
        yield from timed.generated(cache, -1, few)
    yield from timed.first_steps()
    # Without a cache a call takes as long as several others together: one is kept, and none is spent on warming up.
    yield from timed.generated("none", 0, settings.n_new_tokens)
    cached, uncached = ([way for way in timed.ways if (way.cache == "none") == without] for without in (False, True))
    work = [*((timed.generated, cache) for cache in named.KINDS[1:]), *((timed.written, way) for way in cached)]
    for repeat in progress.track(range(settings.n_repeats), label="generate and decoding: repeat"):
        turn = repeat % len(work)
        for take, way in work[turn:] + work[:turn]:
            yield from take(way, repeat, settings.n_new_tokens)
        # They are measured on the tokens that the cached ways wrote.
        for way in uncached:
            yield from timed.at_some_lengths(way, repeat)
        yield from _head(model, ids.shape[1] + settings.n_new_tokens, repeat)


def _head(model: PreTrainedModel, n_tokens: int, repeat: int) -> Rows:
    """Time the head on the last row: with no cache, `generate` slices it out of all rows without copying it."""
    head = model.get_output_embeddings()
    rows = torch.ones(1, n_tokens, head.in_features, dtype=model.dtype, device=model.device)
    last = rows[:, -1:]
    # A single row counts as contiguous whatever its strides, so it must be told to be copied.
    copy = last.clone(memory_format=torch.contiguous_format)
    for engine, row in ((named.HEAD_VIEW, last), (named.HEAD_COPY, copy)):
        # The first call may set buffers up.
        head(row)
        _, seconds = timing.timed(lambda row=row: head(row), model.device)
        yield _row(Way("none"), repeat, named.HEAD, 0, n_tokens, seconds) | {"engine": engine}


class _Timed:
    """`generate` as the document calls it, and the one loop of `kvbook.measuring.decoding`, in each of its ways."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, settings: StaticCacheSettings) -> None:
        self._model, self._ids = model, ids
        room = ids.shape[1] + settings.n_new_tokens
        self.ways = {way: decoding.Decoder(model, way, room, settings.scope) for way in ways(settings)}
        # Graphs that were compiled for `generate`, by kind of cache.
        self._made: Counter[str] = Counter()
        self._written: torch.Tensor | None = None

    def generated(self, cache: str, repeat: int, count: int) -> list[Row]:
        """Write one text by `generate`; the turn before the first one has a number below 0."""
        before = graphs_compiled()
        _, seconds = timing.timed(
            lambda: self._model.generate(
                self._ids, attention_mask=torch.ones_like(self._ids), pad_token_id=0, do_sample=False,
                max_new_tokens=count, min_new_tokens=count, **_OPTIONS[cache],
            ),
            self._model.device,
        )
        self._made[cache] += graphs_compiled() - before
        way, phase = Way(cache, compiled=self._made[cache] > 0), named.COMPILE if repeat < 0 else named.WHOLE
        row = _row(way, repeat, phase, 0, self._ids.shape[1], seconds, graphs=self._made[cache])
        return [row | {"engine": named.GENERATE, "n_steps": count}]

    def first_steps(self) -> Rows:
        """Compile, and take the first steps of every way of the loop."""
        for way, decoder in progress.track(self.ways.items(), len(self.ways), "first steps, compiling: way"):
            # The first step makes the graph, the second may make it again for a length that turned out to vary.
            token = decoder.start(self._ids)
            for step in range(1, _FIRST_STEPS + 1):
                token, row = self._step(way, -1, named.COMPILE, step, token)
                yield row
            decoder.close()

    def written(self, way: Way, repeat: int, count: int) -> list[Row]:
        """Read the prompt and write one text by the loop."""
        decoder, length = self.ways[way], self._ids.shape[1]
        token, seconds = timing.timed(lambda: decoder.start(self._ids), self._ids.device)
        tokens, rows = [token], [_row(way, repeat, named.PREFILL, 0, length, seconds, token.item())]
        for step in range(1, count):
            token, row = self._step(way, repeat, named.DECODE, step, token)
            tokens.append(token)
            rows.append(row)
        decoder.close()
        if self._written is None:
            self._written = torch.cat(tokens, 1)
        return rows

    def at_some_lengths(self, way: Way, repeat: int) -> Rows:
        """Take steps at some lengths on the tokens that a cached way wrote."""
        decoder, last = self.ways[way], self._written.shape[1] - 1
        for step in sorted({1 + round(i * (last - 1) / (_N_LENGTHS - 1)) for i in range(_N_LENGTHS)}):
            decoder.resume(torch.cat([self._ids, self._written[:, : step - 1]], 1))
            yield self._step(way, repeat, named.DECODE, step, self._written[:, step - 1 : step])[1]
        decoder.close()

    def _step(self, way: Way, repeat: int, phase: str, step: int, token: torch.Tensor) -> tuple[torch.Tensor, Row]:
        """Take one step of the loop; count the graphs that were compiled for it."""
        before, context = graphs_compiled(), self._ids.shape[1] + step
        following, seconds = timing.timed(lambda: self.ways[way].step(token), token.device)
        return following, _row(way, repeat, phase, step, context, seconds, following.item(), graphs_compiled() - before)


def _row(
    way: Way, repeat: int, phase: str, step: int, context: int, seconds: float, token: int | str = "", graphs: int = 0
) -> Row:
    return {
        "engine": named.LOOP, "cache": way.cache, "compiled": int(way.compiled), "one_row": int(way.one_row),
        "large_pages": int(way.large_pages), "repeat": repeat, "phase": phase, "step": step, "context": context,
        "n_steps": 1, "seconds": seconds, "token": token, "graphs": graphs,
    }


def work(settings: StaticCacheSettings) -> Work:
    """Count the passes of each model in each dtype."""
    written = settings.n_new_tokens * settings.n_repeats
    # With a cache generate and the loop write in eight ways; without one generate writes once, half of the text on
    # average.
    return Work(
        max(1, settings.n_new_tokens // 2), settings.n_new_tokens + 2 * _N_LENGTHS * settings.n_repeats, 8 * written,
        (settings.dtype,), copies=2,
    )


EXPERIMENT = Experiment("static_speed", StaticCacheSettings, inputs, measure, revision=2, timed=True, work=work)
