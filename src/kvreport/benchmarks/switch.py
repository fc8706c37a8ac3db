"""What row-invariant arithmetic costs beside stock's: of several shapes, behind long texts, in memory, part by part."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvbook import progress
from kvbook.measuring import memory, timing
from kvbook.runs import Row, Rows
from kvbook.settings import read_yaml
from kvreport.benchmarks import budget
from kvreport.benchmarks.turns import BenchSettings, by_turns, random_model, row
from kvreport.chapters.exact_caches import ExactCachesSettings, cost, paths
from kvreport.chapters.exact_caches import rows as exact_ways

# Tokens that are read at once, with stock arithmetic and with the row-invariant one.
_PREFILLED = 512
# Tokens behind which single steps are timed, up to the model's context.
_LENGTHS = (2048, 8191)
# Decode steps that are taken apart.
_STEPS = 16
# Shapes with other forms of attention and of layers.
_BEYOND = read_yaml(Path(__file__).with_suffix(".tables.yaml"))


def at_one_length(settings: BenchSettings) -> Rows:
    """Compare stock arithmetic with the row-invariant one, in the bench's dtype and in fp32."""
    for dtype in dict.fromkeys([settings.dtype, "float32"]):
        asked = ExactCachesSettings.checked(
            device=settings.device, seed=settings.seed, n_repeats=settings.n_repeats, cost_shape=settings.shape,
            cost_dtype=dtype, n_prefill=_PREFILLED, n_context=100,
        )
        rows = cost.EXPERIMENT.run(asked).rows
        times = rows.pivot(index="repeat", columns="arithmetic", values=["prefill_s", "decode_s"])
        for phase, name in (("prefill_s", f"prefill of {_PREFILLED} tokens"), ("decode_s", "decode step")):
            stock, ours = times[phase][exact_ways.STOCK], times[phase][exact_ways.EXACT]
            yield row(f"row-invariant {name}, {dtype}", "stock", ours, stock)


def beyond(settings: BenchSettings) -> Rows:
    """Compare them on a sliding window and on a mixture of experts."""
    asked = ExactCachesSettings.checked(n_prefill=128, n_context=100, n_steps=8)
    ids = torch.arange(3, 3 + asked.n_prefill)[None].to(settings.device)
    for name in _BEYOND:
        turn = partial(cost.turn, _shaped(settings, name), ids, asked)
        what = f"row-invariant decode step, {name}, {settings.dtype}"
        yield _in_turn(settings, what, lambda arithmetic, turn=turn: turn(arithmetic)["decode_s"])


def _in_turn(settings: BenchSettings, what: str, of: Callable[[str], float], stock: str = "stock") -> Row:
    """Let both arithmetics take turns at one piece of work."""
    ours, theirs = (partial(of, arithmetic) for arithmetic in (exact_ways.EXACT, exact_ways.STOCK))
    return by_turns(what, ours, stock, theirs, settings.n_repeats)


def behind_long_texts(settings: BenchSettings) -> Rows:
    """Compare them behind long texts, whose keys and values are drawn, and by the peak of memory of a prefill."""
    for dtype in dict.fromkeys([settings.dtype, "float32"]):
        model, ids = random_model(settings, _PREFILLED, dtype=dtype)
        for length in _LENGTHS:
            what = f"row-invariant decode step behind {length:,} tokens, {dtype}"
            yield _in_turn(settings, what, partial(_seconds_behind, model, length))
        peak = partial(_peak, model, ids)
        what = f"row-invariant prefill of {_PREFILLED} tokens, {dtype}: peak of memory"
        # Where a system counts none, there is no ratio.
        if peak(exact_ways.STOCK):
            # Bytes, and no seconds.
            yield _in_turn(settings, what, peak, "stock's") | {"seconds": None, "against_seconds": None}


def _step_behind(model: torch.nn.Module, length: int) -> Callable[[], Any]:
    """Prepare a step behind drawn keys and values."""
    config, cache = model.config, DynamicCache(config=model.config)
    shape = 1, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, *shape, dtype=model.dtype, device=model.device), layer)
    return partial(model, torch.tensor([[3]], device=model.device), past_key_values=cache)


def _seconds_behind(model: torch.nn.Module, length: int, arithmetic: str) -> float:
    step = _step_behind(model, length)
    with torch.inference_mode(), paths.switched(arithmetic):
        return timing.timed(step, model.device)[1]


def _peak(model: torch.nn.Module, ids: torch.Tensor, arithmetic: str) -> float:
    with torch.inference_mode(), paths.switched(arithmetic):
        return float(memory.peak(lambda: cost.prefill(model, ids), model.device)[1] or 0)


def _shaped(settings: BenchSettings, name: str) -> torch.nn.Module:
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        config = AutoConfig.for_model(**_BEYOND[name])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    return model.eval().requires_grad_(False)


def taken_apart(settings: BenchSettings) -> Rows:
    """Say where the milliseconds of what has a target go, part by part, beside stock's."""
    model, ids = random_model(settings, 100 + 2 * _STEPS)
    yield from _apart(settings, f"decode step, {settings.dtype}", model, partial(_steps, model, ids), _STEPS)
    for name in _BEYOND:
        model, what = _shaped(settings, name), f"decode step, {name}, {settings.dtype}"
        yield from _apart(settings, what, model, partial(_steps, model, ids % model.config.vocab_size), _STEPS)
    model, ids = random_model(settings, _PREFILLED, dtype="float32")
    prefill = partial(model, ids, use_cache=True, logits_to_keep=1)
    yield from _apart(settings, f"prefill of {_PREFILLED} tokens, float32", model, lambda: prefill)
    what = f"decode step behind {_LENGTHS[-1]:,} tokens, float32"
    yield from _apart(settings, what, model, partial(_step_behind, model, _LENGTHS[-1]))


def _apart(
    settings: BenchSettings, what: str, model: torch.nn.Module, prepare: Callable[[], Callable[[], Any]], n: int = 1
) -> Rows:
    """Take apart what a function prepares, in both arithmetics by turns; it is n equal pieces of work."""
    turns: list[dict[str, dict[str, float]]] = [
        {arithmetic: _parts_of(model, prepare, arithmetic) for arithmetic in exact_ways.ARITHMETICS}
        for _ in progress.track(range(settings.n_repeats + 1), label=f"budget of a {what}: repeat")
    ]
    for part in turns[0][exact_ways.STOCK]:
        # The first turn compares kernels.
        ours, stock = ([turn[of][part] for turn in turns[1:]] for of in (exact_ways.EXACT, exact_ways.STOCK))
        yield row(f"row-invariant {what}: {part}", "stock's", ours, stock, n)


def _parts_of(model: torch.nn.Module, prepare: Callable[[], Callable[[], Any]], arithmetic: str) -> dict[str, float]:
    with torch.inference_mode(), paths.switched(arithmetic):
        work = prepare()
        with budget.kept(model) as seconds:
            work()
    return seconds


def _steps(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """Prepare decode steps, after as many that make room and choose kernels."""
    cache = model(ids[:, : -2 * _STEPS], use_cache=True, logits_to_keep=1).past_key_values

    def step(tokens: torch.Tensor) -> None:
        for token in tokens.split(1, 1):
            model(token, past_key_values=cache)

    step(ids[:, -2 * _STEPS : -_STEPS])
    return partial(step, ids[:, -_STEPS:])
