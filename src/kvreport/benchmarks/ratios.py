"""``make bench``: this project's speed, as ratios measured side by side in one run, and kept as a record.

Wall times of a shared machine wander; the ratio of two pieces of work that take turns does not, or less.  Every bench
is a run of its own, since its seed, which changes no time, is new each time.  Rows, one a ratio: see
``data/README.md``.

`PARTS` lists what is measured; each part yields its rows.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from pydantic import Field
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvbook import exact, paths, progress
from kvbook.diagnosis import check as checks
from kvbook.diagnosis.settings import CheckSettings
from kvbook.errors import UserError
from kvbook.measuring import memory, predictions, timing
from kvbook.models import corpus, loading
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvbook.settings import DTypeName, Settings
from kvreport.benchmarks import budget
from kvreport.benchmarks.results import EXPERIMENT, ONE_CALL
from kvreport.chapters.exact_caches import cost
from kvreport.chapters.exact_caches import rows as exact_ways
from kvreport.chapters.exact_caches.settings import ExactCachesSettings
from kvreport.chapters.layer_drift import by_layer as layer_drift
from kvreport.chapters.static_cache import measures as static_cache
from kvreport.chapters.static_cache import memory_bandwidth, one_call
from kvreport.chapters.static_cache import rows as static_rows
from kvreport.chapters.static_cache import speed as static_speed
from kvreport.chapters.static_cache.settings import StaticCacheSettings
from kvreport.publishing import found

# Tokens of the text whose predictions are compared; the second half is read on a cache of the first.
_SCORED = 128
# Tokens that are read at once, with stock arithmetic and with the row-invariant one.
_PREFILLED = 512
# Tokens behind which single steps are timed, up to the model's context.
_LENGTHS = (2048, 8191)
# Decode steps that are taken apart.
_STEPS = 16
# How often a check has its turn: it takes as long as dozens of passes.
_CHECKS = 2
# What it is taken apart into.
_PARTS_OF_CHECK = {
    "weights": (loading, "load"), "passes": (checks._Measured, "_rows_of"), "judging": (checks._Measured, "judged"),
}
# The check as a command, on weights of the package, and what any program with a model imports.
_MODEL = ("smollm2", "--weights", "package")
_IMPORTS = "import torch, transformers; transformers.AutoModelForCausalLM"
# Beyond the window, and with fewer experts chosen than there are; about a hundred million parameters each.
_SHARED: dict[str, Any] = {"vocab_size": 32000, "num_key_value_heads": 4, "tie_word_embeddings": True}
_BEYOND = {
    "sliding window": _SHARED | {
        "model_type": "mistral", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "sliding_window": 64,
    },
    "mixture of experts": _SHARED | {
        "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 896, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}

Rows = Iterator[dict[str, Any]]
# Does a piece of work, and returns its seconds.
Timed = Callable[[], float]


class BenchSettings(Settings):
    """Settings of a bench.

    Attributes
    ----------
    shape : str
        Family whose full-size architecture, with random weights, decodes.
    dtype : str
        In which it does.
    n_samples : int
        Texts of the drift harness.
    n_new_tokens : int
        Tokens that each way of decoding writes.
    n_repeats : int
        How often each of two ways has its turn.
    book : bool
        Whether the book is built too, which takes minutes.
    profile : str
        With which parameters.
    """

    shape: Annotated[str, Field(min_length=1)] = "smollm2"
    dtype: DTypeName = "bfloat16"
    n_samples: Annotated[int, Field(ge=2)] = 10
    n_new_tokens: Annotated[int, Field(ge=4)] = 48
    n_repeats: Annotated[int, Field(ge=2)] = 10
    book: bool = False
    profile: str = "smoke"


def _row(what: str, against: str, ours: Sequence[float], theirs: Sequence[float], n: int = 1) -> dict[str, Any]:
    """Say how many times as long the second takes, turn by turn; seconds are of one of n equal pieces."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "what": what, "against": against,
        "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "repeats": len(ratios),
        "seconds": statistics.median(ours) / n, "against_seconds": statistics.median(theirs) / n,
    }


def _turns(what: str, ours: Timed, against: str, theirs: Timed, repeats: int, n: int = 1) -> dict[str, Any]:
    """Let two pieces of work take turns; the first round only warms up."""
    rounds = [(ours(), theirs()) for _ in progress.track(range(repeats + 1), label=f"{what}: round")]
    return _row(what, against, *zip(*rounds[1:], strict=True), n=n)


def _timed(device: torch.device, work: Callable[[], object]) -> Timed:
    return lambda: timing.timed(work, device)[1]


def documented_way(model: torch.nn.Module, samples: list[torch.Tensor]) -> list[float]:
    """Measure drift as issue 25420's comment describes it: three passes per sample, a host copy per layer, means.

    Re-created from the description.  Gradients are left on, as the comment's script leaves them.
    """
    largest = []
    for ids in samples:
        whole = model(ids, output_hidden_states=True)
        prefix = model(ids[:, :-1])
        step = model(ids[:, -1:], past_key_values=prefix.past_key_values, output_hidden_states=True)
        pairs = zip((*whole.hidden_states, whole.logits), (*step.hidden_states, step.logits), strict=True)
        largest.append([(one[:, -1] - other[:, -1]).abs().max().detach().cpu().item() for one, other in pairs])
    return [statistics.fmean(values) for values in zip(*largest, strict=True)]


def our_way(model: torch.nn.Module, samples: list[torch.Tensor]) -> list[dict]:
    """Measure drift as the book does, every statistic of every sample kept."""
    with torch.inference_mode():
        return [row for ids in samples for row in layer_drift.compare(model, ids)]


def _drift_harness(settings: BenchSettings) -> Rows:
    """Compare the two harnesses on one model and set of samples, in two dtypes."""
    for dtype in ("float32", "bfloat16"):
        loaded = loading.load(settings.model, weights=settings.weights, dtype=dtype, device=settings.device)
        model = loaded.model
        # As `from_pretrained` leaves it, which the described script does not change.
        model.requires_grad_(True)
        texts = corpus.samples("stdlib", loaded.tokenizer, settings.n_samples, 64)
        samples = [torch.tensor([sample.ids], device=model.device) for sample in texts]
        ours, theirs = (_timed(model.device, partial(way, model, samples)) for way in (our_way, documented_way))
        what = f"drift of every layer, a sample, {dtype}"
        yield _turns(what, ours, "issue 25420's way", theirs, settings.n_repeats, n=len(samples))


def _statistics(settings: BenchSettings) -> Rows:
    """Compare all statistics of "Does it matter?" with the two passes that they are of."""
    model, ids = _random_model(settings, _SCORED + 1)
    fed, targets = ids[:, :-1], ids[0, 1:]

    def passes() -> tuple[torch.Tensor, torch.Tensor]:
        prefix, rest = fed.split(_SCORED // 2, 1)
        read = model(prefix, use_cache=True)
        after = model(rest, past_key_values=read.past_key_values)
        return model(fed, use_cache=False).logits[0], torch.cat([read.logits, after.logits], 1)[0]

    def everything() -> list[torch.Tensor]:
        scores = predictions.compare(*passes(), targets)
        changed = (-scores.nll).exp() * scores.dlogp.expm1()
        perplexities = [nll.mean().exp() for nll in (scores.nll, scores.nll - scores.dlogp)]
        return [*perplexities, scores.kl.mean(), scores.kl.quantile(0.99), changed.square().mean(), scores.flip.mean()]

    ours, theirs = (_timed(model.device, work) for work in (everything, passes))
    what = f"all statistics of a prediction, a text of {_SCORED} tokens, {settings.dtype}"
    with torch.inference_mode():
        yield _turns(what, ours, "the two passes alone", theirs, settings.n_repeats)


def _random_model(settings: BenchSettings, n_tokens: int, **options: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """Load the full-size shape with random weights, and draw a text for it."""
    options = {"dtype": settings.dtype} | options
    model = loading.load(settings.shape, weights="random", device=settings.device, seed=settings.seed, **options).model
    generator = torch.Generator().manual_seed(settings.seed)
    return model, torch.randint(model.config.vocab_size, (1, n_tokens), generator=generator).to(model.device)


def _decoding(settings: BenchSettings) -> Rows:
    """Compare the static, compiled step with `generate`, and with what memory allows."""
    asked = StaticCacheSettings.checked(
        model=settings.shape, weights="random", device=settings.device, seed=settings.seed, dtype=settings.dtype,
        n_new_tokens=settings.n_new_tokens, n_repeats=settings.n_repeats,
    )
    speed = found.of_runs("static_cache", {"static_speed": static_speed.EXPERIMENT.run(asked)})
    faster = static_cache.OVER_GENERATE(speed)[0].estimate
    steps, timed = speed["steps"], speed["timed"]
    steps = steps[steps["way"] == static_rows.LARGE_PAGES]
    whole = timed[(timed["phase"] == static_rows.WHOLE) & (timed["cache"] == "dynamic")]
    what = f"static cache, one-row step on large pages, compiled, a token, {settings.dtype}"
    a_step, theirs = steps["seconds"].median(), (whole["seconds"] / whole["n_steps"]).median()
    between = {"ratio": faster.value, "lowest": faster.low, "highest": faster.high}
    yield _row(what, "generate", [a_step], [theirs]) | between | {"repeats": settings.n_repeats}
    weights = loading.identify(settings.shape, "random", settings.seed)["parameters"]
    dtype = getattr(torch, settings.dtype)
    kept = memory.kv_bytes_per_token(loading.config_of(settings.shape, "random"), dtype) * steps["context"].mean()
    least = (weights * dtype.itemsize + float(kept)) / static_rows.bandwidth(_bandwidth(settings))
    taken = list(steps.groupby("repeat")["seconds"].median())
    share = _row("its share of the memory bandwidth", "a STREAM kernel", taken, [least] * len(taken))
    yield share | {"seconds": a_step}
    if called := one_call.EXPERIMENT.run(asked):
        step_s = called.rows.pivot(index="repeat", columns="program", values="step_s")
        ours = step_s[static_rows.ONE_CALL]
        yield _row(f"{ONE_CALL}, a token, {settings.dtype}", "generate, a token", ours, step_s[static_rows.GENERATE])
        yield _row(f"{ONE_CALL}'s share of the memory bandwidth", "a STREAM kernel", ours, step_s[static_rows.MEMORY])


def _bandwidth(settings: BenchSettings) -> pd.DataFrame:
    """Read memory now, in the same minutes, whatever was measured before."""
    return pd.DataFrame(memory_bandwidth.read(torch.device(settings.device)))


def _switch(settings: BenchSettings) -> Rows:
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
            yield _row(f"row-invariant {name}, {dtype}", "stock", ours, stock)


def _switch_beyond(settings: BenchSettings) -> Rows:
    """Compare them on a sliding window and on a mixture of experts."""
    asked = ExactCachesSettings.checked(n_prefill=128, n_context=100, n_steps=8)
    ids = torch.arange(3, 3 + asked.n_prefill)[None].to(settings.device)
    for name in _BEYOND:
        turn = partial(cost.turn, _beyond(settings, name), ids, asked)
        ours, stock = (
            lambda arithmetic=arithmetic, turn=turn: turn(arithmetic)["decode_s"]
            for arithmetic in (exact_ways.EXACT, exact_ways.STOCK)
        )
        what = f"row-invariant decode step, {name}, {settings.dtype}"
        yield _turns(what, ours, "stock", stock, settings.n_repeats)


def _switch_at_length(settings: BenchSettings) -> Rows:
    """Compare them behind long texts, whose keys and values are drawn, and by the peak of memory of a prefill."""
    for dtype in dict.fromkeys([settings.dtype, "float32"]):
        model, ids = _random_model(settings, _PREFILLED, dtype=dtype)
        for length in _LENGTHS:
            ours, stock = (partial(_step_behind, model, length, of) for of in (exact_ways.EXACT, exact_ways.STOCK))
            what = f"row-invariant decode step behind {length:,} tokens, {dtype}"
            yield _turns(what, ours, "stock", stock, settings.n_repeats)
        ours, stock = (partial(_peak, model, ids, of) for of in (exact_ways.EXACT, exact_ways.STOCK))
        what = f"row-invariant prefill of {_PREFILLED} tokens, {dtype}: peak of memory"
        # Where a system counts none, there is no ratio.
        if stock():
            # Bytes, and no seconds.
            yield _turns(what, ours, "stock's", stock, settings.n_repeats) | {"seconds": None, "against_seconds": None}


def _step_behind(model: torch.nn.Module, length: int, arithmetic: str) -> float:
    config, cache = model.config, DynamicCache(config=model.config)
    shape = 1, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        states = torch.randn(2, *shape, dtype=model.dtype, device=model.device)
        cache.update(*states, layer)
    token = torch.tensor([[3]], device=model.device)
    with torch.inference_mode(), _switched(arithmetic):
        return timing.timed(lambda: model(token, past_key_values=cache), model.device)[1]


def _peak(model: torch.nn.Module, ids: torch.Tensor, arithmetic: str) -> float:
    with torch.inference_mode(), _switched(arithmetic):
        return float(memory.peak(lambda: cost.prefill(model, ids), model.device)[1] or 0)


def _beyond(settings: BenchSettings, name: str) -> torch.nn.Module:
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        config = AutoConfig.for_model(**_BEYOND[name])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    return model.eval().requires_grad_(False)


def _switch_budget(settings: BenchSettings) -> Rows:
    """Say where the milliseconds of what has a target go, part by part, beside stock's."""
    model, ids = _random_model(settings, 100 + 2 * _STEPS)
    yield from _apart(settings, f"decode step, {settings.dtype}", _parts_of_a_step, model, ids)
    for name in _BEYOND:
        what = f"decode step, {name}, {settings.dtype}"
        yield from _apart(settings, what, _parts_of_a_step, _beyond(settings, name), ids % _SHARED["vocab_size"])
    model, ids = _random_model(settings, _PREFILLED, dtype="float32")
    yield from _apart(settings, f"prefill of {_PREFILLED} tokens, float32", _parts_of_a_prefill, model, ids)


def _apart(settings: BenchSettings, what: str, parts: Callable[..., dict[str, float]], *of: Any) -> Rows:
    turns: list[dict[str, dict[str, float]]] = [
        {arithmetic: parts(*of, arithmetic) for arithmetic in exact_ways.ARITHMETICS}
        for _ in progress.track(range(settings.n_repeats + 1), label=f"budget of a {what}: repeat")
    ]
    for part in turns[0][exact_ways.STOCK]:
        # The first turn compares kernels.
        ours, stock = ([turn[of][part] for turn in turns[1:]] for of in (exact_ways.EXACT, exact_ways.STOCK))
        yield _row(f"row-invariant {what}: {part}", "stock's", ours, stock)


def _switched(arithmetic: str) -> AbstractContextManager[Any]:
    return exact.row_invariant() if arithmetic == exact_ways.EXACT else nullcontext()


def _parts_of_a_prefill(model: torch.nn.Module, ids: torch.Tensor, arithmetic: str) -> dict[str, float]:
    with torch.inference_mode(), _switched(arithmetic), budget.kept(model) as seconds:
        model(ids, use_cache=True, logits_to_keep=1)
    return seconds


def _parts_of_a_step(model: torch.nn.Module, ids: torch.Tensor, arithmetic: str) -> dict[str, float]:
    with torch.inference_mode(), _switched(arithmetic):
        cache = model(ids[:, : -2 * _STEPS], use_cache=True, logits_to_keep=1).past_key_values

        def step(tokens: torch.Tensor) -> None:
            for token in tokens.split(1, 1):
                model(token, past_key_values=cache)

        # The first steps make room and choose kernels.
        step(ids[:, -2 * _STEPS : -_STEPS])
        with budget.kept(model) as seconds:
            step(ids[:, -_STEPS:])
    return {part: seconds[part] / _STEPS for part in seconds}


def _check(settings: BenchSettings) -> Rows:
    """Compare a whole check, imports apart, with one full pass of one of its texts."""
    name, _, weights = _MODEL
    asked = CheckSettings.checked(model=name, weights=weights, device=settings.device)
    model, ids = _random_model(settings, asked.n_tokens, dtype="float32")
    one_pass = _timed(model.device, torch.inference_mode()(lambda: model(ids, use_cache=False)))
    what, whole, apart = f"one full pass of {asked.n_tokens} tokens, float32", "kvbook check, imports apart", []

    def check() -> None:
        start = time.perf_counter()
        with budget.of_calls(_PARTS_OF_CHECK) as seconds:
            checks.check(asked)
        apart.append(seconds | {whole: time.perf_counter() - start})

    yield _turns(what, one_pass, whole, _timed(model.device, check), _CHECKS)
    for part in _PARTS_OF_CHECK:
        yield _row(f"kvbook check: {part}", whole, *([turn[of] for turn in apart[1:]] for of in (part, whole)))
    command, imports = ([sys.executable, *of] for of in (["-m", "kvbook", "check", *_MODEL], ["-c", _IMPORTS]))
    ours, theirs = (_timed(model.device, partial(_quietly, of)) for of in (command, imports))
    yield _turns("kvbook check of the 135 M model, imports included", ours, "imports alone", theirs, _CHECKS)


def _quietly(command: list[str]) -> None:
    # The bench itself has kept all cores busy, for which a check would leave one of them free.
    all_cores = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    if (done := subprocess.run(command, check=False, capture_output=True, text=True, env=all_cores)).returncode:
        raise UserError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _book(settings: BenchSettings) -> Rows:
    """Build a copy of the book from nothing, again, and with one chapter to execute."""
    if not settings.book:
        return
    with tempfile.TemporaryDirectory(prefix="kvbook-book-") as scratch:
        root = Path(scratch) / "book"
        shutil.copytree(paths.ROOT, root, ignore=shutil.ignore_patterns("_build", ".*", "tests", "src"))
        cold = _seconds_to_build(root, settings.profile)
        warm = _seconds_to_build(root, settings.profile)
        first = min((root / "_build" / "executed").glob("*.ipynb"))
        first.unlink()
        one = _seconds_to_build(root, settings.profile)
    yield _row(f"book, nothing to do ({settings.profile})", "from nothing", [warm], [cold])
    yield _row(f"book, chapter {first.stem} to execute ({settings.profile})", "from nothing", [one], [cold])


def _seconds_to_build(root: Path, profile: str) -> float:
    environment = os.environ | {"KVBOOK_ROOT": str(root), "KVBOOK_BUILD": str(root / "_build"), "PROFILE": profile}
    start = time.perf_counter()
    command = [sys.executable, "-m", "kvbook", "build"]
    if subprocess.run(command, cwd=root, env=environment, check=False, stdout=sys.stderr).returncode:
        raise UserError("the book cannot be built, so its time cannot be measured: see above, or leave --book out")
    return time.perf_counter() - start


PARTS: dict[str, Callable[[BenchSettings], Rows]] = {
    "drift": _drift_harness, "statistics": _statistics, "decoding": _decoding, "switch": _switch,
    "switch beyond": _switch_beyond, "switch at length": _switch_at_length, "switch budget": _switch_budget,
    "check": _check, "book": _book,
}


def _inputs(settings: BenchSettings) -> dict[str, Any]:
    models = ((settings.model, settings.weights), (settings.shape, "random"))
    return {"models": [loading.identify(model, weights, settings.seed) for model, weights in models]}


def _measure(settings: BenchSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Run every part; an interrupted bench goes on after its last finished one."""
    for name, part in PARTS.items():
        if name not in writer.done:
            writer.append(name, part(settings))


BENCH = Experiment(EXPERIMENT, BenchSettings, _inputs, _measure, timed=True)
