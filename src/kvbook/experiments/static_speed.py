"""Tokens a second by kind of cache and by compilation, apart: load, compile, prefill and decode.

``generate`` is called as the document calls it, with as many new tokens at least as at most; and one loop
(`kvbook.decoding`) decodes in every way, so that two ways differ in nothing else.  Speed does not depend on what the
weights have learnt, so the true shape with random weights stands for the document's model.

Without a cache a step's time depends on its length alone, and takes longest; it is measured at some lengths, on the tokens
that the cached way wrote.  Rows, one a (engine, way, repeat, phase, step): see ``data/README.md``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from kvbook import decoding, progress, records, timing
from kvbook.decoding import Way
from kvbook.experiments import frame
from kvbook.models import loading, placement, registry
from kvbook.settings import StaticCacheSettings

GENERATE, LOOP = "generate", "loop"
LOAD, COMPILE, PREFILL, DECODE, WHOLE = "load", "compile", "prefill", "decode", "whole"

# Lengths at which a step without a cache is measured.
_N_LENGTHS = 9
# Tokens of `generate`'s first call on a CPU.
_FEW = 4
# Steps that come before the times: compilation, buffers, the code paths of a fresh graph.
_FIRST_STEPS = 2


def weights_of(settings: StaticCacheSettings) -> str:
    """Choose the weights of the timed model: those asked for; a folder and a hub id bring their own."""
    return settings.weights if settings.model in registry.families() else "stand-in"


def identify(settings: StaticCacheSettings) -> dict[str, Any]:
    """Name the timed model, and refuse a dtype or device that is not there, before anything is loaded."""
    placement.dtype_on(settings.dtype, placement.device_of(settings.device))
    return loading.identify(settings.model, weights_of(settings), settings.seed)


def load(settings: StaticCacheSettings) -> loading.Loaded:
    """Load the timed model."""
    return loading.load(
        settings.model, weights=weights_of(settings), dtype=settings.dtype, device=settings.device, seed=settings.seed
    )


def ways(settings: StaticCacheSettings) -> list[Way]:
    """List the ways of the loop: every cache, eager and compiled; and the one-row form, where it can be compiled."""
    found = [Way(cache, compiled) for compiled in (False, True) for cache in ("none", "dynamic", "static")]
    if settings.scope == "layer":
        found.append(Way("static", compiled=True, one_row=True))
    return found


def run(settings: StaticCacheSettings) -> records.Run:
    """Measure the times, or read them if these inputs have been measured.

    Raises
    ------
    UserError
        For settings that cannot be run.
    """
    model = identify(settings)
    n_prompt = len(loading.tokenizer(settings.model, weights_of(settings))(settings.prompt)["input_ids"])
    loading.check_length(model, n_prompt + settings.n_new_tokens)
    return frame.recorded(
        __name__,
        settings,
        lambda writer: _measure(settings, writer),
        models=[model],
    )


def graphs_compiled() -> int:
    """Count the graphs that torch has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def _measure(settings: StaticCacheSettings, writer: records.Writer) -> None:
    if "all" in writer.done:
        return
    device = placement.device_of(settings.device)
    loaded, load_s = timing.timed(
        lambda: load(settings),
        device,
    )
    about = {"model": loaded.name, "weights": loaded.weights, "dtype": settings.dtype}
    ids = loaded.tokenizer(settings.prompt, return_tensors="pt")["input_ids"].to(device)
    rows = [_row(Way("none"), 0, LOAD, 0, 0, load_s) | {"engine": "", "cache": "", "n_steps": 0}]
    # What an earlier experiment of this process compiled must neither be found nor count against the limit.
    torch.compiler.reset()
    with torch.inference_mode():
        rows += _generated(loaded.model, ids, settings)
        rows += _looped(loaded.model, ids, settings)
    torch.compiler.reset()
    writer.append("all", [about | row for row in rows])


def _generated(model: PreTrainedModel, ids: torch.Tensor, settings: StaticCacheSettings) -> Iterator[dict[str, Any]]:
    options = {"none": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}}
    mask, made = torch.ones_like(ids), dict.fromkeys(options, 0)
    # The turn before the first is apart: buffers, for which a few tokens do, and, on a GPU, the compilation that a static
    # cache sets off, which depends on the length.
    first = min(_FEW, settings.n_new_tokens) if model.device.type == "cpu" else settings.n_new_tokens
    turns = [(repeat, cache) for repeat in range(-1, settings.n_repeats) for cache in options]
    # Without a cache a call takes as long as several others together: one is kept, and none is spent on warming up.
    turns = [(repeat, cache) for repeat, cache in turns if cache != "none" or repeat == 0]
    for repeat, cache in progress.track(turns, label="generate: run"):
        before, count = graphs_compiled(), first if repeat < 0 else settings.n_new_tokens
        _, seconds = timing.timed(
            lambda cache=cache, count=count: model.generate(
                ids, attention_mask=mask, pad_token_id=0, do_sample=False, max_new_tokens=count, min_new_tokens=count,
                **options[cache],
            ),
            model.device,
        )  # fmt: skip
        made[cache] += graphs_compiled() - before
        way = Way(cache, compiled=made[cache] > 0)
        phase = COMPILE if repeat < 0 else WHOLE
        yield _row(way, repeat, phase, 0, ids.shape[1], seconds, graphs=made[cache]) | {
            "engine": GENERATE, "n_steps": count,
        }  # fmt: skip


def _looped(model: PreTrainedModel, ids: torch.Tensor, settings: StaticCacheSettings) -> Iterator[dict[str, Any]]:
    n_prompt = ids.shape[1]
    room = n_prompt + settings.n_new_tokens
    decoders = {way: decoding.Decoder(model, way, room, settings.scope) for way in ways(settings)}
    # What the compiler does once in a process must not be charged to the way that comes first.
    torch.compile(lambda x: x + 1)(ids)
    for way, decoder in progress.track(decoders.items(), len(decoders), "first steps, compiling: way"):
        # The first step makes the graph, the second may make it again for a length that turned out to vary.
        token = decoder.start(ids)
        for step in range(1, _FIRST_STEPS + 1):
            _, token, seconds, made = _timed_step(decoder, step, token)
            yield _row(way, -1, COMPILE, step, n_prompt + step, seconds, token=token.item(), graphs=made)
        decoder.close()
    # The cached ways write the tokens on which the others' lengths are measured.
    written: torch.Tensor | None = None
    order = sorted(decoders, key=lambda way: way.cache == "none")
    turns = [(repeat, way) for repeat in range(settings.n_repeats) for way in order]
    for repeat, way in progress.track(turns, label="decoding: run"):
        decoder = decoders[way]
        if way.cache == "none":
            times = _at_some_lengths(decoder, ids, written)
        else:
            token, seconds = timing.timed(lambda decoder=decoder: decoder.start(ids), model.device)
            yield _row(way, repeat, PREFILL, 0, n_prompt, seconds, token=token.item())
            times = _decode(decoder, token, settings.n_new_tokens)
            written = torch.cat([token, *(done.token for done in times)], 1) if written is None else written
        for step, following, seconds, made in times:
            yield _row(way, repeat, DECODE, step, n_prompt + step, seconds, token=following.item(), graphs=made)
        decoder.close()


class _Step(NamedTuple):
    """A decode step: its number, the token that it gave, its seconds, and the graphs that were compiled for it."""

    step: int
    token: torch.Tensor
    seconds: float
    graphs: int


def _timed_step(decoder: decoding.Decoder, step: int, token: torch.Tensor) -> _Step:
    before = graphs_compiled()
    following, seconds = timing.timed(lambda: decoder.step(token), token.device)
    return _Step(step, following, seconds, graphs_compiled() - before)


def _decode(decoder: decoding.Decoder, token: torch.Tensor, n_new: int) -> list[_Step]:
    """Write all tokens behind the first."""
    steps: list[_Step] = []
    for step in range(1, n_new):
        steps.append(_timed_step(decoder, step, steps[-1].token if steps else token))
    return steps


def _at_some_lengths(decoder: decoding.Decoder, ids: torch.Tensor, written: torch.Tensor) -> list[_Step]:
    """Do some of the steps on tokens that were written before."""
    last = written.shape[1] - 1
    steps = []
    for step in sorted({1 + round(i * (last - 1) / (_N_LENGTHS - 1)) for i in range(_N_LENGTHS)}):
        decoder.resume(torch.cat([ids, written[:, : step - 1]], 1))
        steps.append(_timed_step(decoder, step, written[:, step - 1 : step]))
    return steps


def _row(
    way: Way, repeat: int, phase: str, step: int, context: int, seconds: float, token: int | str = "", graphs: int = 0
) -> dict[str, Any]:
    return {
        "engine": LOOP, "cache": way.cache, "compiled": int(way.compiled), "one_row": int(way.one_row),
        "repeat": repeat, "phase": phase, "step": step, "context": context, "n_steps": 1,
        "seconds": seconds, "token": token, "graphs": graphs,
    }  # fmt: skip
