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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvbook import UserError, paths, progress
from kvbook.diagnosis import CheckSettings
from kvbook.diagnosis import check as checks
from kvbook.measuring import memory, predictions, timing
from kvbook.models import corpus, loading, unpacked
from kvbook.runs import Experiment, Inputs, Row, Rows, Writer
from kvbook.settings import DTypeName, Settings, Text, at_least
from kvreport.benchmarks import apart
from kvreport.benchmarks.results import EXPERIMENT, ONE_CALL
from kvreport.chapters.exact_caches import cost
from kvreport.chapters.exact_caches import paths as exact_paths
from kvreport.chapters.exact_caches import rows as exact_ways
from kvreport.chapters.exact_caches.settings import ExactCachesSettings
from kvreport.chapters.layer_drift import by_layer as layer_drift
from kvreport.chapters.static_cache import measures as static_cache
from kvreport.chapters.static_cache import memory_bandwidth, one_call
from kvreport.chapters.static_cache import rows as static_rows
from kvreport.chapters.static_cache import speed as static_speed
from kvreport.chapters.static_cache.settings import StaticCacheSettings
from kvreport.publishing import found
from kvreport.running.planning import run_of

# Tokens of the text whose predictions are compared; the second half is read on a cache of the first.
_SCORED = 128
# How often a check has its turn: it takes as long as dozens of passes.
_CHECKS = 2
# Files of tests that are named one by one.
_SLOWEST = 12
# Of which model, and what any program with a model imports.
_MODEL = ("smollm2", "--weights", "package")
_IMPORTS = "import torch, transformers; transformers.LlamaForCausalLM"
# Tokens that are read at once, with stock arithmetic and with the row-invariant one.
_PREFILLED = 512
# Tokens behind which single steps are timed, up to the model's context.
_LENGTHS = (2048, 8191)
# Decode steps that are taken apart.
_STEPS = 16
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
    tests : bool
        Whether all tests are run too, which takes minutes.
    """

    shape: Text = "smollm2"
    dtype: DTypeName = "bfloat16"
    n_samples: at_least(2) = 10
    n_new_tokens: at_least(4) = 48
    n_repeats: at_least(2) = 10
    book: bool = False
    profile: str = "smoke"
    tests: bool = False


def row(what: str, against: str, ours: Sequence[float], theirs: Sequence[float], n: int = 1) -> Row:
    """Say how many times as long the second takes, turn by turn; seconds are of one of n equal pieces."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "what": what, "against": against,
        "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "repeats": len(ratios),
        "seconds": statistics.median(ours) / n, "against_seconds": statistics.median(theirs) / n,
    }


def by_turns(what: str, ours: Timed, against: str, theirs: Timed, repeats: int, n: int = 1) -> Row:
    """Let two pieces of work take turns; the first round only warms up."""
    rounds = [(ours(), theirs()) for _ in progress.track(range(repeats + 1), label=f"{what}: round")]
    return row(what, against, *zip(*rounds[1:], strict=True), n=n)


def timer(device: torch.device, work: Callable[[], object]) -> Timed:
    """Do a piece of work and return its seconds, each time that it is called."""
    return lambda: timing.timed(work, device)[1]


def random_model(settings: BenchSettings, n_tokens: int, **options: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """Load the full-size shape with random weights, and draw a text for it."""
    options = {"dtype": settings.dtype} | options
    model = loading.load(settings.shape, weights="random", device=settings.device, seed=settings.seed, **options).model
    generator = torch.Generator().manual_seed(settings.seed)
    return model, torch.randint(model.config.vocab_size, (1, n_tokens), generator=generator).to(model.device)


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
        # As `from_pretrained` leaves it, which the described script does not change.
        model = loaded.model.requires_grad_(True)
        texts = corpus.samples("stdlib", loaded.tokenizer, settings.n_samples, 64)
        samples = [torch.tensor([sample.ids], device=model.device) for sample in texts]
        ours, theirs = (timer(model.device, partial(way, model, samples)) for way in (our_way, documented_way))
        what = f"drift of every layer, a sample, {dtype}"
        yield by_turns(what, ours, "issue 25420's way", theirs, settings.n_repeats, n=len(samples))


def _statistics(settings: BenchSettings) -> Rows:
    """Compare all statistics of "Does it matter?" with the two passes that they are of."""
    model, ids = random_model(settings, _SCORED + 1)
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

    ours, theirs = (timer(model.device, work) for work in (everything, passes))
    what = f"all statistics of a prediction, a text of {_SCORED} tokens, {settings.dtype}"
    with torch.inference_mode():
        yield by_turns(what, ours, "the two passes alone", theirs, settings.n_repeats)


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
    yield row(what, "generate", [a_step], [theirs]) | between | {"repeats": settings.n_repeats}
    weights = loading.identify(settings.shape, "random", settings.seed)["parameters"]
    dtype = getattr(torch, settings.dtype)
    kept = memory.kv_bytes_per_token(loading.config_of(settings.shape, "random"), dtype) * steps["context"].mean()
    least = (weights * dtype.itemsize + float(kept)) / static_rows.bandwidth(_bandwidth(settings))
    taken = list(steps.groupby("repeat")["seconds"].median())
    share = row("its share of the memory bandwidth", "a STREAM kernel", taken, [least] * len(taken))
    yield share | {"seconds": a_step}
    if called := one_call.EXPERIMENT.run(asked):
        step_s = called.rows.pivot(index="repeat", columns="program", values="step_s")
        ours = step_s[static_rows.ONE_CALL]
        yield row(f"{ONE_CALL}, a token, {settings.dtype}", "generate, a token", ours, step_s[static_rows.GENERATE])
        yield row(f"{ONE_CALL}'s share of the memory bandwidth", "a STREAM kernel", ours, step_s[static_rows.MEMORY])


def _bandwidth(settings: BenchSettings) -> pd.DataFrame:
    """Read memory now, in the same minutes, whatever was measured before."""
    return pd.DataFrame(memory_bandwidth.read(torch.device(settings.device)))


def _at_one_length(settings: BenchSettings) -> Rows:
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


def _beyond(settings: BenchSettings) -> Rows:
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


def _behind_long_texts(settings: BenchSettings) -> Rows:
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
    with torch.inference_mode(), exact_paths.switched(arithmetic):
        return timing.timed(step, model.device)[1]


def _peak(model: torch.nn.Module, ids: torch.Tensor, arithmetic: str) -> float:
    with torch.inference_mode(), exact_paths.switched(arithmetic):
        return float(memory.peak(lambda: cost.prefill(model, ids), model.device)[1] or 0)


def _shaped(settings: BenchSettings, name: str) -> torch.nn.Module:
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        config = AutoConfig.for_model(**_BEYOND[name])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    return model.eval().requires_grad_(False)


def _taken_apart(settings: BenchSettings) -> Rows:
    """Say where the milliseconds of what has a target go, part by part, beside stock's."""
    model, ids = random_model(settings, 100 + 2 * _STEPS)
    yield from _apart(settings, f"decode step, {settings.dtype}", model, partial(_steps, model, ids), _STEPS)
    for name in _BEYOND:
        model, what = _shaped(settings, name), f"decode step, {name}, {settings.dtype}"
        yield from _apart(settings, what, model, partial(_steps, model, ids % _SHARED["vocab_size"]), _STEPS)
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
    with torch.inference_mode(), exact_paths.switched(arithmetic):
        work = prepare()
        with apart.of_model(model) as seconds:
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


def _check(settings: BenchSettings) -> Rows:
    """Compare a check with one full pass of one of its texts, and the command with its imports; take that apart."""
    name, _, weights = _MODEL
    asked = CheckSettings.checked(model=name, weights=weights, device=settings.device)
    model, ids = random_model(settings, asked.n_tokens, dtype="float32")
    one_pass = timer(model.device, torch.inference_mode()(lambda: model(ids, use_cache=False)))
    what = f"one full pass of {asked.n_tokens} tokens, float32"
    whole = timer(model.device, partial(checks.check, asked))
    yield by_turns(what, one_pass, "kvbook check, imports apart", whole, _CHECKS)
    # The bench itself has kept all cores busy, for which a check would leave one of them free.
    all_cores, turns = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}, []

    def command() -> None:
        seconds, done = apart.timed(["check", *_MODEL], capture_output=True, text=True, env=all_cores)
        if done.returncode:
            raise UserError(f"kvbook check {' '.join(_MODEL)}: {done.stderr.strip()}")
        turns.append(seconds)

    def imports() -> None:
        subprocess.run([sys.executable, "-c", _IMPORTS], check=True, env=all_cores)

    ours, theirs = (timer(model.device, of) for of in (command, imports))
    what = "kvbook check of the 135 M model, imports included"
    yield by_turns(what, ours, "imports alone", theirs, _CHECKS)
    yield from _named("kvbook check", what, turns[1:])


def _named(command: str, whole: str, turns: list[dict[str, float]]) -> Rows:
    """Name the parts of a command's time, which add up to the whole."""
    for part in turns[0]:
        yield row(f"{command}: {part}", whole, [turn[part] for turn in turns], [sum(turn.values()) for turn in turns])


def _book(settings: BenchSettings) -> Rows:
    """Build a copy of the book from nothing, again, and with one chapter to execute."""
    if not settings.book:
        return
    with tempfile.TemporaryDirectory(prefix="kvbook-book-") as scratch:
        root = Path(scratch) / "book"
        shutil.copytree(paths.ROOT, root, ignore=shutil.ignore_patterns("_build", ".*", "tests"))
        if (models := unpacked.models_folder()).is_dir():
            # Fetching the trained model is part of the installation.
            shutil.copytree(models, root / "_build" / models.name)
        cold = sum(_built(root, settings.profile).values())
        executed = sorted((root / "_build" / "executed").glob("*.ipynb"))
        took = {chapter.stem: run_of(chapter)["duration_s"] for chapter in executed}
        named = _built(root, settings.profile)
        executed[0].unlink()
        one = sum(_built(root, settings.profile).values())
    warm, nothing = sum(named.values()), f"book, nothing to do ({settings.profile})"
    whole = f"book from nothing ({settings.profile})"
    yield row(whole, "nothing to do", [cold], [warm])
    for stem, seconds in took.items():
        yield row(f"{whole}: chapter {stem}", "the whole", [seconds], [cold])
    yield row(nothing, "from nothing", [warm], [cold])
    yield from _named(nothing, "the whole", [named])
    yield row(f"book, chapter {executed[0].stem} to execute ({settings.profile})", "from nothing", [one], [cold])


def _built(root: Path, profile: str) -> dict[str, float]:
    """Build a book; return the seconds of the build's parts."""
    environment = os.environ | {"KVBOOK_ROOT": str(root), "KVBOOK_BUILD": str(root / "_build"), "PROFILE": profile}
    seconds, done = apart.timed(["build"], cwd=root, env=environment, stdout=sys.stderr)
    if done.returncode:
        raise UserError("the book cannot be built, so its time cannot be measured: see above, or leave --book out")
    return seconds


def _tests(settings: BenchSettings) -> Rows:
    """Run all tests, once, and say which files take the time; files run beside one another."""
    if not settings.tests:
        return
    with tempfile.TemporaryDirectory(prefix="kvbook-tests-") as scratch:
        report, start = Path(scratch) / "tests.xml", time.perf_counter()
        command = ["make", "test", f"TESTS=--junitxml={report}"]
        if subprocess.run(command, cwd=paths.ROOT, check=False, stdout=sys.stderr).returncode:
            raise UserError("a test fails, so the time of all cannot be measured: see above, or leave --tests out")
        whole = time.perf_counter() - start
        cases = ElementTree.parse(report).getroot().iter("testcase")
        of_file = pd.DataFrame([(case.get("classname"), float(case.get("time", 0))) for case in cases])
    seconds = of_file.groupby(0)[1].sum().sort_values(ascending=False)
    apart = "its tests one after the other"
    yield row("make test, installed", apart, [whole], [seconds.sum()])
    for file, taken in (*seconds[:_SLOWEST].items(), ("all other files", seconds[_SLOWEST:].sum())):
        yield row(f"make test: {file}", apart, [taken], [seconds.sum()])


PARTS: dict[str, Callable[[BenchSettings], Rows]] = {
    "drift": _drift_harness, "statistics": _statistics, "decoding": _decoding, "switch": _at_one_length,
    "switch beyond": _beyond, "switch at length": _behind_long_texts, "switch budget": _taken_apart,
    "check": _check, "book": _book, "tests": _tests,
}


def _inputs(settings: BenchSettings) -> Inputs:
    models = ((settings.model, settings.weights), (settings.shape, "random"))
    return {"models": [loading.identify(model, weights, settings.seed) for model, weights in models]}


def _measure(settings: BenchSettings, _made_of: Inputs, writer: Writer) -> None:
    """Run every part; an interrupted bench goes on after its last finished one."""
    for name, part in writer.pending(PARTS, "bench: part"):
        writer.append(name, part(settings))


BENCH = Experiment(EXPERIMENT, BenchSettings, _inputs, _measure, timed=True)
