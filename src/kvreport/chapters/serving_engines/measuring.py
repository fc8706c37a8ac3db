"""What an engine writes after the same prompts in several ways, and what transformers in fp64 says of it.

Requests are by token ids, to an engine's server or to the library in process.  An experiment for each engine, which
measures nothing where its environment is not there.  Rows, one a token: see ``data/README.md``.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from kvbook import UserError
from kvbook.measuring import choosing
from kvbook.models import corpus, loading, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvbook.scores import adapters
from kvbook.server.client import Client, Refused
from kvbook.server.session import FIELDS
from kvreport.chapters.serving_engines import ServingEnginesSettings
from kvreport.chapters.serving_engines import rows as named
from kvreport.engines import serving
from kvreport.engines.listed import BF16, ENGINES, FP32

# Likeliest tokens of each position, over which a divergence is taken.
TOP = 20
_COLUMNS = (
    "engine", "dtype", "way", "texts", "sample", "source", "position", "token", "logprob", "logprob_fp64", "kl_fp64",
    "cached", "refused",
)


class Written(NamedTuple):
    """What was written after a prompt: per token its id, its log-probability, and those of the likeliest ids."""

    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]
    cached: int | None = None


def ask(server: Client, ids: Sequence[int], tokens: int, cold: Sequence[str] = ()) -> Written:
    """Have a prompt continued greedily; with the fields of `cold`, from nothing reused."""
    fresh = {name: FIELDS[name]() for name in cold}
    return written(server.continued(list(ids), tokens, logprobs=TOP, return_tokens_as_token_ids=True, **fresh))


def together(server: Client, prompts: Sequence[Sequence[int]], tokens: int, cold: Sequence[str] = ()) -> list[Written]:
    """Send several requests at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: ask(server, ids, tokens, cold), prompts))


def written(reply: Mapping[str, Any]) -> Written:
    """Read an answer whose tokens have ids: llama.cpp's form, or vLLM's."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    tokens, logprobs, likeliest = adapters.of_choice(reply["choices"][0], "id")
    if not tokens:
        raise Refused("the answer has no log-probabilities")
    top = [{_id(token): value for token, value in each.items()} for each in likeliest]
    return Written([_id(token) for token in tokens], logprobs, top, details.get("cached_tokens"))


def _id(token: int | str) -> int:
    """Read an id, in vLLM's form too, which is a text."""
    return int(str(token).removeprefix("token_id:"))


@torch.inference_mode()
def write(model: PreTrainedModel, prompts: list[list[int]], tokens: int, warm: bool = False) -> list[Written]:
    """Continue prompts together; warm ones compute only what follows the last whole block of a prefix cache."""
    cache, ids = DynamicCache(config=model.config), torch.tensor(prompts, device=model.device)
    cached = (ids.shape[1] - 1) // named.BLOCK * named.BLOCK if warm else 0
    if cached:
        model(ids[:, :cached], past_key_values=cache)
    found = [Written([], [], [], cached) for _ in prompts]
    for _, logits, chosen in choosing.written(model, ids[:, cached:], tokens, cache):
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        best = logs.topk(min(TOP, logs.shape[-1]))
        for row, one in enumerate(found):
            if not one.tokens or one.tokens[-1] not in choosing.ends_of(model):
                one.tokens.append(int(chosen[row]))
                one.logprobs.append(float(logs[row, chosen[row]]))
                one.top.append(dict(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)))
    return found


@torch.inference_mode()
def read(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of every token at each place of a text, by one pass without a cache."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    return model.get_output_embeddings()(hidden).log_softmax(-1)


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
        yield lambda way, prompts, tokens: write(model, prompts, tokens, way == named.WARM)
        return
    with serving.serving(name, dtype, mode) as server:

        def ask(way: str, prompts: list[list[int]], tokens: int) -> list[Written]:
            if way != named.WARM:
                return together(server, prompts, tokens, ENGINES[name].cold)
            # Right after it was asked for: a server has a few places in which a prefix is kept.
            together(server, prompts, 1)
            return together(server, prompts, tokens)

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
    logs = read(said, prompt, one.tokens)
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
