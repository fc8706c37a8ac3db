"""``make bench``: this project's speed, as ratios measured side by side in one run, and kept as a record.

Wall times of a shared machine wander; the ratio of two pieces of work that take turns does not, or less.  Every bench
is a run of its own, since its seed, which changes no time, is new each time.  Rows, one a ratio: see
``data/README.md``.

`PARTS` lists what is measured; each part gives its rows.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from pydantic import Field
from torch.nn.functional import kl_div, nll_loss
from transformers import AutoConfig, AutoModelForCausalLM

from kvbook import fingerprint, paths, progress
from kvbook.diagnosis import check as checks
from kvbook.diagnosis.settings import CheckSettings
from kvbook.errors import UserError
from kvbook.measuring import memory, predictions, timing
from kvbook.models import corpus, loading
from kvbook.runs import machine, records
from kvbook.settings import DTypeName, Settings
from kvreport.benchmarks.results import EXPERIMENT
from kvreport.chapters.exact_caches import cost
from kvreport.chapters.exact_caches import rows as exact_ways
from kvreport.chapters.exact_caches.settings import ExactCachesSettings
from kvreport.chapters.layer_drift import by_layer as layer_drift
from kvreport.chapters.static_cache import measures as static_cache
from kvreport.chapters.static_cache import memory_bandwidth
from kvreport.chapters.static_cache import rows as static_rows
from kvreport.chapters.static_cache import speed as static_speed
from kvreport.chapters.static_cache.settings import StaticCacheSettings
from kvreport.publishing import found

# Tokens of the text whose predictions are compared; the second half is read on a cache of the first.
_SCORED = 128
# Tokens that are read at once, with stock arithmetic and with the row-invariant one.
_PREFILLED = 512
# Beyond the window, and with fewer experts chosen than there are.
_BEYOND: dict[str, dict[str, Any]] = {
    "sliding window": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "sliding_window": 64,
        "tie_word_embeddings": True,
    },
    "mixture of experts": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 896,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": True,
    },
}

# How often a check has its turn: it takes as long as dozens of passes.
_CHECKS = 2

Reads = Callable[[torch.Tensor], torch.Tensor]


class BenchSettings(Settings):
    """Settings of a bench.

    Attributes
    ----------
    shape : str
        Family whose true shape, with random weights, decodes.
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
    n_samples: Annotated[int, Field(ge=2)] = 40
    n_new_tokens: Annotated[int, Field(ge=4)] = 48
    n_repeats: Annotated[int, Field(ge=2)] = 10
    book: bool = False
    profile: str = "smoke"


def documented_way(model: torch.nn.Module, samples: list[torch.Tensor]) -> dict[str, float]:
    """Measure drift as issue 25420's comment describes it: three forward passes a sample, a host copy a layer, means.

    Re-created from the description.  Gradients are left on, as the comment's script leaves them.
    """
    largest: dict[str, list[float]] = {}
    for ids in samples:
        whole = model(ids, output_hidden_states=True)
        prefix = model(ids[:, :-1])
        step = model(ids[:, -1:], past_key_values=prefix.past_key_values, output_hidden_states=True)
        for layer, (one, other) in enumerate(zip(whole.hidden_states, step.hidden_states, strict=True)):
            difference = (one[:, -1] - other[:, -1]).abs().max()
            largest.setdefault(f"layer {layer}", []).append(difference.detach().cpu().item())
        difference = (whole.logits[0, -1] - step.logits[0, -1]).abs().max()
        largest.setdefault("logits", []).append(difference.detach().cpu().item())
    return {place: statistics.fmean(values) for place, values in largest.items()}


def our_way(model: torch.nn.Module, samples: list[torch.Tensor]) -> list[dict]:
    """Measure drift as the book does, every statistic of every sample kept."""
    with torch.inference_mode():
        return [row for ids in samples for row in layer_drift.compare(model, ids)]


def _row(what: str, against: str, ours: Sequence[float], theirs: Sequence[float], n: int = 1) -> dict[str, Any]:
    """Say how many times as long the second takes, turn by turn; seconds are of one of n equal pieces."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "what": what, "against": against,
        "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "repeats": len(ratios),
        "seconds": statistics.median(ours) / n, "against_seconds": statistics.median(theirs) / n,
    }


def _in_turn(
    first: Callable[[], object], second: Callable[[], object], device: torch.device, rounds: int, label: str
) -> tuple[list[float], list[float]]:
    """Time two pieces of work in turn; the first round only warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in progress.track(range(rounds + 1), label=f"{label}: round"):
        for work, into in zip((first, second), times, strict=True):
            _, seconds = timing.timed(work, device)
            if turn:
                into.append(seconds)
    return times


def _drift_harness(settings: BenchSettings) -> Iterator[dict]:
    """Compare the two harnesses on one model and set of samples, in two dtypes."""
    for dtype in ("float32", "bfloat16"):
        loaded = loading.load(settings.model, weights=settings.weights, dtype=dtype, device=settings.device)
        model = loaded.model
        # As `from_pretrained` leaves it, which the described script does not change.
        model.requires_grad_(True)
        texts = corpus.samples("stdlib", loaded.tokenizer, settings.n_samples, 64)
        samples = [torch.tensor([sample.ids], device=model.device) for sample in texts]
        ours, theirs = _in_turn(
            partial(our_way, model, samples), partial(documented_way, model, samples),
            model.device, settings.n_repeats, f"drift harness, {dtype}",
        )
        yield _row(f"drift of every layer, a sample, {dtype}", "issue 25420's way", ours, theirs, n=len(samples))


def statistics_in_one_pass(one: Reads, other: Reads, ids: torch.Tensor) -> dict[str, float]:
    """Compare two ways as the book does: each is run once, and what is kept of its rows gives every statistic."""
    scores = predictions.compare(one(ids[:, :-1]), other(ids[:, :-1]), ids[0, 1:])
    p = (-scores.nll).exp()
    return {
        "perplexity": scores.nll.mean().exp().item(),
        "other's perplexity": (scores.nll - scores.dlogp).mean().exp().item(),
        "mean KL": scores.kl.mean().item(),
        "99th percentile of KL": scores.kl.quantile(0.99).item(),
        "RMS of the change in p": (p * scores.dlogp.expm1()).square().mean().sqrt().item(),
        "same top": 1 - scores.flip.mean().item(),
    }


def statistic_by_statistic(one: Reads, other: Reads, ids: torch.Tensor) -> dict[str, float]:
    """Compare two ways as separate scripts do: each statistic runs what it needs, and forgets it.

    Parameters and result are those of `statistics_in_one_pass`.
    """
    fed, targets = ids[:, :-1], ids[0, 1:]

    def logp(way: Reads) -> torch.Tensor:
        return way(fed).float().log_softmax(-1)

    def perplexity(way: Reads) -> float:
        return nll_loss(logp(way), targets).exp().item()

    def divergences() -> torch.Tensor:
        return kl_div(logp(other), logp(one), reduction="none", log_target=True).sum(-1)

    def change() -> torch.Tensor:
        first, second = (logp(way).exp().gather(1, targets[:, None]) for way in (one, other))
        return second - first

    return {
        "perplexity": perplexity(one),
        "other's perplexity": perplexity(other),
        "mean KL": divergences().mean().item(),
        "99th percentile of KL": divergences().quantile(0.99).item(),
        "RMS of the change in p": change().square().mean().sqrt().item(),
        "same top": (one(fed).argmax(-1) == other(fed).argmax(-1)).float().mean().item(),
    }


def _statistics(settings: BenchSettings) -> Iterator[dict]:
    """Compare the statistics of "Does it matter?" with the two passes that they are of, and with a script a statistic."""
    model, ids = _random_model(settings, _SCORED + 1)

    def whole(fed: torch.Tensor) -> torch.Tensor:
        return model(fed, use_cache=False).logits[0]

    def split(fed: torch.Tensor) -> torch.Tensor:
        prefix, rest = fed.split(_SCORED // 2, 1)
        read = model(prefix, use_cache=True)
        return torch.cat([read.logits, model(rest, past_key_values=read.past_key_values).logits], 1)[0]

    rivals = {
        "the two passes alone": lambda: (whole(ids[:, :-1]), split(ids[:, :-1])),
        "a script a statistic": lambda: statistic_by_statistic(whole, split, ids),
    }
    what = f"all statistics of a prediction, a text of {_SCORED} tokens, {settings.dtype}"
    with torch.inference_mode():
        for name, rival in rivals.items():
            ours = partial(statistics_in_one_pass, whole, split, ids)
            times = _in_turn(ours, rival, model.device, settings.n_repeats, f"statistics against {name}")
            yield _row(what, name, *times)


def _random_model(settings: BenchSettings, n_tokens: int, **options: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """Load the full-size shape with random weights, and draw a text for it."""
    options = {"dtype": settings.dtype} | options
    model = loading.load(settings.shape, weights="random", device=settings.device, seed=settings.seed, **options).model
    generator = torch.Generator().manual_seed(settings.seed)
    return model, torch.randint(model.config.vocab_size, (1, n_tokens), generator=generator).to(model.device)


def _decoding(settings: BenchSettings) -> Iterator[dict]:
    """Compare the static, compiled step with `generate`, and with what memory allows."""
    asked = StaticCacheSettings.checked(
        model=settings.shape, weights="random", device=settings.device, seed=settings.seed, dtype=settings.dtype,
        n_new_tokens=settings.n_new_tokens, n_repeats=settings.n_repeats,
    )
    speed = found.of_runs("static_cache", {"static_speed": static_speed.EXPERIMENT.run(asked)})
    faster = static_cache.OVER_GENERATE(speed)[0].estimate
    steps = speed["steps"][speed["steps"]["way"] == static_rows.LARGE_PAGES]
    a_step = float(steps["seconds"].median())
    timed = speed["timed"]
    whole = timed[(timed["phase"] == static_rows.WHOLE) & (timed["cache"] == "dynamic")]
    yield {
        "what": f"static cache, one-row step on large pages, compiled, a token, {settings.dtype}",
        "against": "generate",
        "ratio": faster.value, "lowest": faster.low, "highest": faster.high, "repeats": settings.n_repeats,
        "seconds": a_step, "against_seconds": float((whole["seconds"] / whole["n_steps"]).median()),
    }
    identity = loading.identify(settings.shape, "random", settings.seed)
    dtype = getattr(torch, settings.dtype)
    kept = memory.kv_bytes_per_token(loading.config_of(settings.shape, "random"), dtype) * float(
        steps["context"].mean()
    )
    least = (identity["parameters"] * dtype.itemsize + kept) / static_rows.bandwidth(_bandwidth(settings))
    taken = list(steps.groupby("repeat")["seconds"].median())
    yield _row("its share of the memory bandwidth", "a STREAM kernel", taken, [least] * len(taken)) | {
        "seconds": a_step
    }


def _bandwidth(settings: BenchSettings) -> pd.DataFrame:
    """Read memory now, beside the rest, whatever was measured before."""
    with tempfile.TemporaryDirectory(prefix="kvbook-") as scratch:
        memory_bandwidth.measure(torch.device(settings.device), records.Writer(Path(scratch)))
        return pd.read_csv(Path(scratch) / "rows.csv")


def _switch(settings: BenchSettings) -> Iterator[dict]:
    """Compare stock arithmetic with the row-invariant one, in the bench's dtype and in fp32."""
    for dtype in dict.fromkeys([settings.dtype, "float32"]):
        asked = ExactCachesSettings.checked(
            device=settings.device, seed=settings.seed, n_repeats=settings.n_repeats, cost_shape=settings.shape,
            cost_dtype=dtype, n_prefill=_PREFILLED, n_context=100,
        )
        rows = cost.EXPERIMENT.run(asked).rows
        times = rows.pivot(index="repeat", columns="arithmetic", values=["prefill_s", "decode_s"])
        for phase, name in (("prefill_s", f"prefill of {_PREFILLED} tokens"), ("decode_s", "decode step")):
            stock, exact = times[phase][exact_ways.STOCK], times[phase][exact_ways.EXACT]
            yield _row(f"row-invariant {name}, {dtype}", "stock", exact, stock)


def _switch_beyond(settings: BenchSettings) -> Iterator[dict]:
    """Compare them on a sliding window and on a mixture of experts, of about a hundred million parameters each."""
    asked = ExactCachesSettings.checked(n_prefill=128, n_context=100, n_steps=8)
    for name, shape in _BEYOND.items():
        config = AutoConfig.for_model(**shape)
        torch.manual_seed(settings.seed)
        with torch.device(settings.device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
        model = model.eval().requires_grad_(False)
        ids = torch.arange(3, 3 + asked.n_prefill)[None].to(model.device)
        times: dict[str, list[float]] = {arithmetic: [] for arithmetic in exact_ways.ARITHMETICS}
        for repeat in progress.track(range(settings.n_repeats + 1), label=f"switch, {name}: round"):
            for arithmetic in exact_ways.ARITHMETICS[:: 1 if repeat % 2 else -1]:
                seconds = cost.turn(model, ids, asked, arithmetic)["decode_s"]
                if repeat:
                    times[arithmetic].append(seconds)
        what = f"row-invariant decode step, {name}, {settings.dtype}"
        yield _row(what, "stock", times[exact_ways.EXACT], times[exact_ways.STOCK])


def _check(settings: BenchSettings) -> Iterator[dict]:
    """Compare a whole check, imports apart, with one full pass of one of its texts."""
    asked = CheckSettings.checked(
        model=settings.shape, weights="random", device=settings.device, seed=settings.seed
    )
    model, ids = _random_model(settings, asked.n_tokens, dtype="float32")

    def full() -> None:
        with torch.inference_mode():
            model(ids, use_cache=False)

    times = _in_turn(full, lambda: checks.check(asked), model.device, _CHECKS, "check")
    yield _row(f"one full pass of {asked.n_tokens} tokens, float32", "kvbook check, imports apart", *times)


def _book(settings: BenchSettings) -> Iterator[dict]:
    """Build a copy of the book from nothing, again, and with one chapter to execute."""
    with tempfile.TemporaryDirectory(prefix="kvbook-book-") as scratch:
        root = Path(scratch) / "book"
        left_out = shutil.ignore_patterns("_build", ".*", "tests", "src")
        shutil.copytree(paths.ROOT, root, ignore=left_out)
        build = root / "_build"
        cold = _seconds_to_build(root, settings.profile)
        warm = _seconds_to_build(root, settings.profile)
        first = sorted((build / "executed").glob("*.ipynb"))[0]
        first.unlink()
        one = _seconds_to_build(root, settings.profile)
    yield _row(f"book, nothing to do ({settings.profile})", "from nothing", [warm], [cold])
    yield _row(f"book, chapter {first.stem} to execute ({settings.profile})", "from nothing", [one], [cold])


PARTS: dict[str, Callable[[BenchSettings], Iterable[dict]]] = {
    "drift": _drift_harness, "statistics": _statistics, "decoding": _decoding, "switch": _switch,
    "switch beyond": _switch_beyond, "check": _check,
}


def _seconds_to_build(root: Path, profile: str) -> float:
    environment = os.environ | {"KVBOOK_ROOT": str(root), "KVBOOK_BUILD": str(root / "_build"), "PROFILE": profile}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kvbook", "build"], cwd=root, env=environment, check=False,
        stdout=sys.stderr,
    )
    if done.returncode:
        raise UserError("the book cannot be built, so its time cannot be measured: see above, or leave --book out")
    return time.perf_counter() - start


def run(settings: BenchSettings) -> records.Run:
    """Run every benchmark; one that was interrupted goes on behind its last one."""
    made_of = {
        "settings": settings.model_dump(mode="json"),
        "source": fingerprint.of_source([__name__]),
        "models": [
            loading.identify(settings.model, settings.weights, settings.seed),
            loading.identify(settings.shape, "random", settings.seed),
        ],
        "machine": machine.describe(settings.device),
    }

    def measure(writer: records.Writer) -> None:
        for name, part in (PARTS | ({"book": _book} if settings.book else {})).items():
            if name not in writer.done:
                writer.append(name, part(settings))

    return records.run(EXPERIMENT, made_of, measure, note={"commit": machine.commit()})
