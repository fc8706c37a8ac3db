"""Texts sampled with a cache, and the log-probabilities that a trainer's single pass gives the same tokens.

A second experiment scores them once more, by other caches, batches, chunks and dtypes.  In a third a real rollout
engine, vLLM, samples them.  It has an environment of its own, which only `make engines` makes; without it there is
nothing to measure.

Log-probabilities are computed token by token on a cache, in chunks, and in one pass without a cache, as columns:
tensors of shape (texts, new tokens) by name.  The logits are those of the output head on the last hidden states, which
holds for Llama and its kin.

Rows of all three, one a token: see ``data/README.md``.
"""

import functools
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import linear
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvbook import UserError
from kvbook.exact import row_invariant
from kvbook.measuring import choosing, predictions, rounded_caches
from kvbook.models import corpus, loading, placement, sources
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer, samples
from kvreport.chapters.trainer_and_rollout import TrainerAndRolloutSettings
from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.engines import serving
from kvreport.engines.listed import ENGINES

Columns = dict[str, torch.Tensor]


def _picked(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].double()


@functools.lru_cache(maxsize=1)
def _in_fp32(weight: torch.Tensor) -> torch.Tensor:
    """Convert the head's weights once for all tokens of a model; nothing trains it meanwhile."""
    return weight.float()


def logprobs(
    model: PreTrainedModel, way: str, hidden: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor | None = None
) -> Columns:
    """Score tokens from the hidden states before each: as is usual, with a head in fp32, and with a low softmax."""
    head = model.get_output_embeddings()
    logits = head(hidden) if logits is None else logits
    columns = {way: _picked(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens)}
    if logits.dtype in (torch.bfloat16, torch.float16):
        columns[way + named.FP32_HEAD] = _picked(linear(hidden.float(), _in_fp32(head.weight)), tokens)
        columns[way + named.LOW_SOFTMAX] = _picked(logits, tokens)
    return columns


def one_pass(model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int) -> Columns:
    """Score each text alone in one pass, as a trainer does."""
    hidden = (model.base_model(one, use_cache=False).last_hidden_state[:, prompt - 1 : -1] for one in ids.split(1))
    new = ids[:, prompt:].split(1)
    return joined([logprobs(model, way, *text) for text in zip(hidden, new, strict=True)])


def padded(model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int) -> Columns:
    """Score texts in one batch, each after another number of padding tokens that the mask hides."""
    texts, length = ids.shape
    widest = 3 * texts
    batch, mask = ids[:, :1].repeat(1, widest + length), ids.new_zeros(texts, widest + length)
    # No two start at one place, and none at the first.
    slices = [slice(3 * (row + 1), 3 * (row + 1) + length) for row in range(texts)]
    for row, place in enumerate(slices):
        batch[row, place], mask[row, place] = ids[row], 1
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = model.base_model(batch, attention_mask=mask, position_ids=places, use_cache=False).last_hidden_state
    found = torch.stack([hidden[row, place][prompt - 1 : -1] for row, place in enumerate(slices)])
    return logprobs(model, way, found, ids[:, prompt:])


def cached(
    model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int, at_once: int = 1, cache: Cache | None = None
) -> Columns:
    """Score texts together on a cache that holds their prompts: some tokens at once."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    # The prompt's last token scores the first new one; the last new one is never read.
    parts = [ids[:, :prompt], *(ids[:, prompt:-1].split(at_once, 1) if ids.shape[1] > prompt + 1 else ())]
    scored, place = [], prompt
    for part in parts:
        hidden = model.base_model(part, past_key_values=cache, use_cache=True).last_hidden_state
        hidden = hidden if scored else hidden[:, -1:]
        scored.append(logprobs(model, way, hidden, ids[:, place : place + hidden.shape[1]]))
        place += hidden.shape[1]
    return joined(scored, 1)


def joined(parts: list[Columns], dim: int = 0) -> Columns:
    """Put columns together: those of further texts, or along the tokens of the same ones."""
    return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}


def write(
    model: PreTrainedModel, way: str, prompts: list[corpus.Sample], new_tokens: int, seed: int
) -> tuple[torch.Tensor, Columns]:
    """Continue prompts together with a cache; return the whole texts, and the columns of what was sampled."""
    head, cache = model.get_output_embeddings(), DynamicCache(config=model.config)
    ids = fed = torch.tensor([one.ids for one in prompts], device=model.device)
    texts, parts = [one.index for one in prompts], []
    for step in range(new_tokens):
        hidden = model.base_model(fed, past_key_values=cache, use_cache=True).last_hidden_state[:, -1:]
        logits = head(hidden)
        fed = choosing.greedy(predictions.noisy(logits[:, -1], seed, texts, step))[:, None]
        ids = torch.cat([ids, fed], 1)
        parts.append(logprobs(model, way, hidden, fed, logits) | processed(logits, fed))
    return ids, joined(parts, 1)


def processed(logits: torch.Tensor, tokens: torch.Tensor) -> Columns:
    """Return what temperature, top-k and top-p make of a token's log-probability.

    Where top-k or top-p keeps a token, its processed log-probability is the raw one less the log of the mass kept.
    """
    logs = logits.float().log_softmax(-1)
    rank = (logs > logs.gather(-1, tokens[..., None])).sum(-1)
    masses = logs.sort(descending=True)[0].exp().cumsum(-1, dtype=torch.float64)
    # The smallest set whose mass reaches p: as many tokens as stay below it, and one more.
    below = (masses < named.TOP_P).sum(-1)
    top_k = min(named.TOP_K, masses.shape[-1])
    return {
        named.COOLED: _picked(logits.float() / named.TEMPERATURE, tokens),
        named.MASS_K: masses[..., top_k - 1].log(), named.IN_K: (rank < top_k).double(),
        named.MASS_P: masses.gather(-1, below[..., None])[..., 0].log(), named.IN_P: (rank <= below).double(),
    }


def prompts(settings: TrainerAndRolloutSettings) -> list[corpus.Sample]:
    """Cut the prompts, and refuse shorter ones."""
    return samples.prompts(settings, settings.corpus, settings.n_samples, settings.prompt_tokens)


def inputs(settings: TrainerAndRolloutSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    placement.check(settings.device, (settings.dtype, "float32"))
    model = loading.identify(settings.model, settings.weights, settings.seed)
    loading.check_length(model, settings.prompt_tokens + settings.new_tokens, "new_tokens")
    prompts(settings)
    return {"models": [model], "corpus": corpus.describe(settings.corpus)}


def groups(settings: TrainerAndRolloutSettings) -> dict[str, list[corpus.Sample]]:
    """Put the prompts into batches."""
    texts = prompts(settings)
    return {str(first): texts[first : first + named.BATCH] for first in range(0, len(texts), named.BATCH)}


def measure(settings: TrainerAndRolloutSettings, _made_of: Inputs, writer: Writer) -> None:
    """Write the texts and score them."""
    low, full = (samples.load(settings, settings.model, dtype) for dtype in (settings.dtype, "float32"))
    for unit, group in writer.pending(groups(settings), "rollout: batch"):
        # A smaller batch is filled up with copies, which nobody looks at.
        filled = [group[row % len(group)] for row in range(named.BATCH)]
        with torch.inference_mode():
            ids, columns = write(low.model, named.ROLLOUT, filled, settings.new_tokens, settings.seed)
            ids = ids[: len(group)]
            columns |= one_pass(low.model, named.TRAINER, ids, settings.prompt_tokens)
            columns |= one_pass(full.model, named.TRAINER_FP32, ids, settings.prompt_tokens)
        writer.append(unit, rows_of(group, ids[:, settings.prompt_tokens :], columns, choosing.ends_of(low.model)))


def rows_of(group: list[corpus.Sample], new: torch.Tensor, columns: Columns, ends: set[int]) -> Rows:
    """Lay columns out as rows, up to the token that ends a text; every digit of a float32 is kept."""
    table = {name: values.tolist() for name, values in columns.items()}
    for row, (sample, tokens) in enumerate(zip(group, new.tolist(), strict=True)):
        for position, token in enumerate(tokens):
            yield {"sample": sample.index, "source": sample.source, "position": position, "token": token} | {
                name: f"{values[row][position]:.9g}" for name, values in table.items()
            }
            if token in ends:
                break


def work(settings: TrainerAndRolloutSettings) -> Work:
    """Count the passes of each model."""
    # A step of the batch takes about half as long as eight steps of one text.
    steps = settings.n_samples * settings.new_tokens / 2
    return Work(settings.prompt_tokens + settings.new_tokens, settings.n_samples, steps, (settings.dtype,))


# The settings on which the rows depend: those of policy_gradient are its own.
FIELDS = frozenset(TrainerAndRolloutSettings.model_fields) - {"n_runs", "n_updates"}
EXPERIMENT = Experiment("rollout", TrainerAndRolloutSettings, inputs, measure, fields=FIELDS, work=work)

Score = Callable[[PreTrainedModel, str, torch.Tensor, int], Columns]


def _single(model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int) -> Columns:
    return joined([cached(model, way, one, prompt) for one in ids.split(1)])


def _rounded(bits: int) -> Score:
    # Keys and values are rounded as they enter, so that a single pass reads what a step would.
    return lambda model, way, ids, prompt: cached(
        model, way, ids, prompt, ids.shape[1], rounded_caches.make(model.config, bits, bits)
    )


def _fp8(model: PreTrainedModel, way: str, ids: torch.Tensor, prompt: int) -> Columns:
    return cached(model, way, ids, prompt, cache=QuantizedCache("fp8", config=model.config))


# Each with its dtype; None is the rollout's own.
SCORES: dict[str, tuple[str | None, Score]] = {
    named.SINGLE: (None, _single), named.CHUNKS: (None, functools.partial(cached, at_once=named.CHUNK)),
    named.PADDED: (None, padded),
    named.ROLLOUT_FP32: ("float32", cached), named.TRAINER_FP32: ("float32", one_pass),
    named.ROLLOUT_FP16: ("float16", cached), named.TRAINER_FP16: ("float16", one_pass),
    named.TRAINER_FP64: ("float64", one_pass), named.FP8: (None, _fp8), named.INT8: (None, _rounded(8)),
    named.INT4: (None, _rounded(4)), named.INVARIANT_ROLLOUT: (None, row_invariant()(cached)),
    named.INVARIANT_TRAINER: (None, row_invariant()(one_pass)),
}


def measure_ways(settings: TrainerAndRolloutSettings, _made_of: Inputs, writer: Writer) -> None:
    """Score the texts of the rollout's own run in every way."""
    written = EXPERIMENT.run(settings).rows
    for unit, group in writer.pending(groups(settings), "rollout, ways: batch"):
        texts = [written[written["sample"] == one.index] for one in group]
        longest = max(map(len, texts))
        ids = torch.tensor([
            # What follows a text that ended is never read.
            one.ids + (text["token"].tolist() + [0] * longest)[:longest] for one, text in zip(group, texts, strict=True)
        ])
        columns: Columns = {}
        for way, (dtype, score) in SCORES.items():
            loaded = samples.load(settings, settings.model, dtype or settings.dtype)
            with torch.inference_mode():
                columns |= {way: score(loaded.model, way, ids.to(loaded.model.device), settings.prompt_tokens)[way]}
        scored = rows_of(group, ids[:, settings.prompt_tokens :], columns, choosing.ends_of(loaded.model))
        sides = pd.concat(texts)[[named.ROLLOUT, named.TRAINER]].to_dict("records")
        writer.append(unit, [row | both for row, both in zip(scored, sides, strict=True)])


def work_of_ways(settings: TrainerAndRolloutSettings) -> Work:
    """Count the passes of each model."""
    # Seven ways are passes, four are steps in a batch, which takes about half as long as its texts do, and one alone.
    steps = settings.n_samples * settings.new_tokens * 3
    return Work(settings.prompt_tokens + settings.new_tokens, 8 * settings.n_samples, steps, (settings.dtype,))


WAYS = Experiment("rollout_ways", TrainerAndRolloutSettings, inputs, measure_ways, FIELDS, work=work_of_ways)


ENGINE = "vllm"


def inputs_of_engine(settings: TrainerAndRolloutSettings) -> Inputs | None:
    """Name the model, the corpus and the engine; None without the engine, or for weights that it cannot read."""
    if settings.weights != "package" or not serving.is_here(ENGINE):
        return None
    return inputs(settings) | {"engine": list(ENGINES[ENGINE].packages)}


def measure_engine(settings: TrainerAndRolloutSettings, _made_of: Inputs, writer: Writer) -> None:
    """Let the engine write, and score what it wrote."""
    low, full = (samples.load(settings, settings.model, dtype) for dtype in (settings.dtype, "float32"))
    waiting = {unit: group for unit, group in groups(settings).items() if unit not in writer.done}
    written = dict(zip(waiting, generated(settings, list(waiting.values())), strict=True))
    for unit, group in writer.pending(waiting, "rollout engine: batch"):
        rows: list[Row] = []
        for sample, text in zip(group, written[unit], strict=True):
            ids = torch.tensor([sample.ids + text["tokens"]], device=low.model.device)
            with torch.inference_mode():
                columns = one_pass(low.model, named.TRAINER, ids, settings.prompt_tokens)
                columns |= one_pass(full.model, named.TRAINER_FP32, ids, settings.prompt_tokens)
            columns |= {named.ENGINE: torch.tensor([text["sampled"]]), named.ENGINE_READ: torch.tensor([text["read"]])}
            rows += rows_of([sample], ids[:, settings.prompt_tokens :], columns, choosing.ends_of(low.model))
        writer.append(unit, rows)


def generated(settings: TrainerAndRolloutSettings, groups: list[list[corpus.Sample]]) -> list[list[dict[str, Any]]]:
    """Continue prompts by the engine: tokens, their log-probabilities when sampled, and when read as a prompt.

    It starts once for all groups, which takes minutes on a busy machine; a group is one batch.
    """
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "found.json"
        asked = {
            "model": str(sources.resolve(settings.model, settings.weights).path), "dtype": settings.dtype,
            "seed": settings.seed, "room": settings.prompt_tokens + settings.new_tokens + 1,
            "new_tokens": settings.new_tokens, "to": str(to),
            "groups": [[{"ids": one.ids, "index": one.index} for one in group] for group in groups],
        }
        command = [str(serving.python_of(ENGINE)), str(Path(__file__).with_name("vllm_rollout.py"))]
        clean = serving.variables_of(ENGINES[ENGINE])
        done = subprocess.run(command, input=json.dumps(asked), text=True, env=clean, capture_output=True)
        if done.returncode:
            raise UserError(f"vLLM stopped: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(to.read_text())


BY_ENGINE = Experiment("engine_rollout", TrainerAndRolloutSettings, inputs_of_engine, measure_engine, fields=FIELDS)
