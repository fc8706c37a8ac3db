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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import torch

from kvbook import UserError, paths
from kvbook.diagnosis import CheckSettings, check
from kvbook.measuring import memory, predictions
from kvbook.models import corpus, loading, unpacked
from kvbook.runs import Experiment, Inputs, Rows, Writer
from kvreport.benchmarks import apart, switch
from kvreport.benchmarks.results import EXPERIMENT
from kvreport.benchmarks.turns import BenchSettings, by_turns, random_model, row, timer
from kvreport.chapters.layer_drift import by_layer as layer_drift
from kvreport.chapters.static_cache import StaticCacheSettings, one_call, step_times
from kvreport.chapters.static_cache import measures as static_cache
from kvreport.chapters.static_cache import rows as static_rows
from kvreport.chapters.static_cache import speed as static_speed
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
        ours, theirs, read = (step_s[of] for of in (static_rows.ONE_CALL, static_rows.GENERATE, static_rows.MEMORY))
        yield row(f"step in one call, a token, {settings.dtype}", "generate, a token", ours, theirs)
        yield row("step in one call's share of the memory bandwidth", "a STREAM kernel", ours, read)


def _bandwidth(settings: BenchSettings) -> pd.DataFrame:
    """Read memory now, in the same minutes, whatever was measured before."""
    return pd.DataFrame(step_times.read(torch.device(settings.device)))


def _check(settings: BenchSettings) -> Rows:
    """Compare a check with one full pass of one of its texts, and the command with its imports; take that apart."""
    name, _, weights = _MODEL
    asked = CheckSettings.checked(model=name, weights=weights, device=settings.device)
    model, ids = random_model(settings, asked.n_tokens, dtype="float32")
    one_pass = timer(model.device, torch.inference_mode()(lambda: model(ids, use_cache=False)))
    what = f"one full pass of {asked.n_tokens} tokens, float32"
    whole = timer(model.device, partial(check.check, asked))
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
    "drift": _drift_harness, "statistics": _statistics, "decoding": _decoding, "switch": switch.at_one_length,
    "switch beyond": switch.beyond, "switch at length": switch.behind_long_texts, "switch budget": switch.taken_apart,
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
