"""What an engine writes after the same prompts in several ways, and what transformers in fp64 says of it.

An experiment for each engine, which measures nothing where its environment is not there.  Rows, one a token: see
``data/README.md``.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch

from kvbook import UserError
from kvbook.models import corpus, loading, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvbook.server.client import Refused
from kvreport.chapters.serving_engines import ServingEnginesSettings, asking
from kvreport.chapters.serving_engines import rows as named
from kvreport.chapters.serving_engines.asking import Written
from kvreport.engines import serving
from kvreport.engines.listed import BF16, ENGINES, FP32

_COLUMNS = (
    "engine", "dtype", "way", "texts", "sample", "source", "position", "token", "logprob", "logprob_fp64", "kl_fp64",
    "cached", "refused",
)
# Takes the way, ids of prompts and how many tokens are wanted.
Ask = Callable[[str, list[list[int]], int], list[Written]]


def prompts(settings: ServingEnginesSettings, texts: str) -> list[corpus.Sample]:
    """Cut the prompts of one population."""
    return samples.prompts(settings, texts, settings.n_samples, settings.prompt_tokens)


def inputs(settings: ServingEnginesSettings) -> Inputs:
    """Name the model and the texts, and refuse what cannot be run."""
    placement.check(settings.device, (FP32, BF16, "float64"))
    model = loading.identify(settings.model, settings.weights, settings.seed)
    loading.check_length(model, settings.prompt_tokens + settings.new_tokens, "new_tokens")
    for texts in settings.populations:
        prompts(settings, texts)
    return {"models": [model], "texts": [corpus.describe(texts) for texts in settings.populations]}


def measure_transformers(settings: ServingEnginesSettings, _made_of: Inputs, writer: Writer) -> None:
    """Let the library itself write."""
    for dtype in (FP32, BF16):
        _record(settings, writer, "transformers", dtype)


@contextlib.contextmanager
def _asking(settings: ServingEnginesSettings, name: str, dtype: str, mode: str) -> Iterator[Ask]:
    """Start an engine's server, or take the library in this process, and give what asks it."""
    if name == "transformers":
        model = samples.load(settings, settings.model, dtype).model
        yield lambda way, prompts, tokens: asking.write(model, prompts, tokens, way == named.WARM)
        return
    with serving.serving(name, dtype, mode) as server:

        def ask(way: str, prompts: list[list[int]], tokens: int) -> list[Written]:
            if way != named.WARM:
                return asking.together(server, prompts, tokens, ENGINES[name].cold)
            # Right after it was asked for: a server has a few places in which a prefix is kept.
            asking.together(server, prompts, 1)
            return asking.together(server, prompts, tokens)

        yield ask


def _record(settings: ServingEnginesSettings, writer: Writer, name: str, dtype: str, mode: str = "") -> None:
    """Open a server once for a mode, or for all plain ways that are missing, and write their rows."""
    ways = (mode,) if mode else named.PLAIN
    units = {f"{dtype} {way} {texts}": (way, texts) for way in ways for texts in settings.populations}
    if set(units) <= writer.done:
        return
    said = samples.load(settings, settings.model, "float64").model
    about = {"engine": name, "dtype": dtype}
    try:
        with _asking(settings, name, dtype, mode) as ask:
            for unit, (way, texts) in writer.pending(units, f"{name}, {dtype}: way"):
                asked, rows = prompts(settings, texts), []
                groups = _eights(asked) if way == named.BATCH else [[one] for one in asked]
                tokens = named.AGAIN_TOKENS if way == named.AGAIN else settings.new_tokens
                answers = [one for group in groups for one in ask(way, [each.ids for each in group], tokens)]
                for sample, one in zip(asked, answers, strict=False):
                    of = {"way": way, "texts": corpus.POPULATIONS.get(texts, texts)}
                    of |= {"sample": f"{texts} {sample.index}", "source": sample.source}
                    rows += [about | of | row for row in _tokens(said, sample.ids, one)]
                writer.append(unit, rows)
    except (UserError, Refused) as error:
        if not mode:
            raise
        # What an engine lacks is a row too.
        empty = dict.fromkeys(_COLUMNS, "") | about | {"way": mode, "refused": str(error).partition("; see ")[0]}
        for unit in units.keys() - writer.done:
            writer.append(unit, [empty])


def _eights(asked: list[corpus.Sample]) -> list[list[corpus.Sample]]:
    """Put prompts together by eight, and fill the last group up with copies, whose answers nobody looks at."""
    starts = range(0, len(asked), named.TOGETHER)
    return [[asked[row % len(asked)] for row in range(start, start + named.TOGETHER)] for start in starts]


def _tokens(said: torch.nn.Module, prompt: list[int], one: Written) -> Rows:
    """Lay out what was written, beside what fp64 says of the same text."""
    logs = asking.read(said, prompt, one.tokens)
    for place, (token, value, top) in enumerate(zip(one.tokens, one.logprobs, one.top, strict=True)):
        yield {
            "position": place, "token": token, "logprob": f"{value:.9g}",
            "logprob_fp64": f"{float(logs[place, token]):.12g}", "kl_fp64": divergence(logs[place], top),
            "cached": "" if one.cached is None else one.cached, "refused": "",
        }


def divergence(exact: torch.Tensor, top: dict[int, float]) -> str:
    """Return KL(fp64 ‖ engine) over the engine's likeliest tokens, and all others as one; empty where it tells none."""
    if len(top) < 2:
        return ""
    ids = torch.tensor(list(top), device=exact.device)
    theirs, ours = torch.tensor(list(top.values()), dtype=torch.float64), exact[ids].double().cpu()
    rest = [max(1 - float(part.exp().sum()), 0.0) for part in (ours, theirs)]
    found = float((ours.exp() * (ours - theirs)).sum())
    if min(rest) > 0:
        found += rest[0] * math.log(rest[0] / rest[1])
    return f"{found:.6g}"


def work(settings: ServingEnginesSettings) -> Work:
    """Count the passes of the library's own model."""
    texts = settings.n_samples * len(settings.populations)
    steps = 2.5 * texts * settings.new_tokens
    return Work(settings.prompt_tokens + settings.new_tokens, 4 * texts, steps, (FP32, BF16, "float64"))


ITSELF = Experiment("served_transformers", ServingEnginesSettings, inputs, measure_transformers, work=work)


def _of(name: str, dtype: str) -> Experiment:
    """Make an engine's experiment, which measures nothing without the engine, or on weights that it does not serve."""
    engine = ENGINES[name]

    def inputs_of(settings: ServingEnginesSettings) -> Inputs | None:
        if (settings.model, settings.weights) != (serving.MODEL, "package") or not serving.is_here(name):
            return None
        return inputs(settings) | {"engine": list(engine.packages)}

    def measure(settings: ServingEnginesSettings, _made_of: Inputs, writer: Writer) -> None:
        for mode in ("", *(engine.modes if dtype == FP32 else ())):
            _record(settings, writer, name, dtype, mode)

    return Experiment(named.EXPERIMENT_OF[name, dtype], ServingEnginesSettings, inputs_of, measure)


EXPERIMENTS = (ITSELF, *(_of(*each) for each in named.EXPERIMENT_OF))
