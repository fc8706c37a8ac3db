"""Write ``data/scores/faults.csv.gz``: faults between a rollout and a trainer, made on the real model.

    python tools/score_faults.py

First one for each signature of `kvbook.scores.signatures`, then the twenty of ``data/scores/held_out.yaml``.  Of each
there are eight answers of 20 tokens: log-probabilities of the rollout, which has the fault unless the list says
otherwise, of the trainer, and of a control: the trainer's computation in a padded batch.  A shift, swapped sequences
and other ids need no model; the tests make them from these rows.
"""

import gzip
import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from score_rows import MODEL, WEIGHTS, Processed, Text, Way, answers, called, plain, scored
from transformers import DynamicCache, PreTrainedModel

from kvbook import paths
from kvbook.models import loading

N_TEXTS, N_TOKENS, N_STEPS = 8, 20, 3
DTYPES = ("float32",)
ALONE, PADDED = Way(), Way(6, left=True)
TO = paths.DATA / "scores" / "faults.csv.gz"
KEPT = paths.BUILD / "scores" / "faults.jsonl"


def at_temperature(temperature: float) -> Processed:
    """Divide logits before the softmax."""
    return lambda logits: plain(logits / temperature)


def kept(logits: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Renormalize over the tokens that sampling keeps."""
    return plain(logits.masked_fill(~keep, -torch.inf))


def top_k(count: int) -> Processed:
    """Keep the likeliest tokens."""
    return lambda logits: kept(logits, logits >= logits.topk(count)[0][..., -1:])


def top_p(share: float) -> Processed:
    """Keep the likeliest tokens that together have a share of the probability."""

    def processed(logits: torch.Tensor) -> torch.Tensor:
        ordered, order = logits.float().softmax(-1).sort(descending=True)
        inside = ordered.cumsum(-1) - ordered < share
        return kept(logits, torch.zeros_like(inside).scatter(-1, order, inside))

    return processed


def min_p(share: float) -> Processed:
    """Keep tokens that are not much less likely than the likeliest."""
    return lambda logits: kept(logits, plain(logits) >= plain(logits).amax(-1, keepdim=True) + np.log(share))


def sampled(model: PreTrainedModel, texts: list[Text], processed: Processed) -> list[Text]:
    """Let the model answer again, with other sampling: every token then has a probability there."""
    found = []
    with torch.inference_mode():
        for number, text in enumerate(texts):
            generator, ids, cache = torch.Generator().manual_seed(number), text.ids[: text.n_prompt], DynamicCache()
            fed = ids
            for _ in range(N_TOKENS):
                logits = model(torch.tensor([fed]), past_key_values=cache).logits[0, -1:]
                fed = [int(torch.multinomial(processed(logits).exp()[0], 1, generator=generator))]
                ids = ids + fed
            found.append(replace(text, ids=ids))
    return found


def seeing(allowed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable:
    """Score with a mask of its own: what a cache that lost keys computes, in one pass."""

    def call(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        place = torch.arange(inputs["input_ids"].shape[1])
        query, key = place[:, None], place[None]
        mask = ((key <= query) & allowed(query, key))[None, None]
        return model(**inputs | {"attention_mask": mask}).logits

    return call


def moved(text: Text, by: int) -> Callable:
    """Score with positions that jump between the prompt and the answer."""

    def call(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        positions = inputs["position_ids"].clone()
        positions[:, text.n_prompt :] += by
        return model(**inputs | {"position_ids": positions}).logits

    return call


def penalized(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Make what was said before less likely, by 1.1."""
    logits = called(model, inputs).clone()
    for place in range(logits.shape[1]):
        seen = inputs["input_ids"][0, : place + 1]
        score = logits[0, place, seen]
        logits[0, place, seen] = torch.where(score < 0, score * 1.1, score / 1.1)
    return logits


def capped(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Squash the logits."""
    return 30 * torch.tanh(called(model, inputs) / 30)


def low_head(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the LM head alone in bf16."""
    hidden = model.model(**inputs)[0]
    return torch.nn.functional.linear(hidden.bfloat16(), model.lm_head.weight.bfloat16())


@contextmanager
def hooked(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]):
    """Change keys and values as they are made."""
    handles = [projection.register_forward_hook(lambda _module, _given, output: change(output))
               for layer in model.model.layers for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def weights(tensors: list[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]):
    """Change weights for a while."""
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.data.copy_(change(tensor.data))
    yield
    for tensor, old in zip(tensors, before, strict=True):
        tensor.data.copy_(old)


@contextmanager
def dropping(model: PreTrainedModel):
    """Leave attention dropout on."""
    torch.manual_seed(0)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.05
    yield
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    model.eval()


def linear(model: PreTrainedModel) -> list[torch.Tensor]:
    """List the weights of linear layers."""
    return [part.weight for part in model.model.layers.modules() if isinstance(part, torch.nn.Linear)]


def in_8_bits(weight: torch.Tensor) -> torch.Tensor:
    """Round each row to 255 levels."""
    step = weight.float().abs().amax(1, keepdim=True) / 127
    return ((weight.float() / step).round() * step).to(weight.dtype)


def low_rank(weight: torch.Tensor) -> torch.Tensor:
    """Add an update of rank 4, of 2 % of the weight's norm."""
    generator = torch.Generator().manual_seed(weight.numel())
    update = torch.randn(weight.shape[0], 4, generator=generator) @ torch.randn(4, weight.shape[1], generator=generator)
    return weight + (0.02 * update * weight.float().norm() / update.norm()).to(weight.dtype)


def slower(frequencies: torch.Tensor) -> torch.Tensor:
    """Rotate to base 10,000 in place of the model's."""
    half = len(frequencies)
    found = 10_000.0 ** -(torch.arange(half) / half)
    assert not torch.allclose(found, frequencies), "the model's own base"
    return found


Case = dict[str, list[np.ndarray]]


def stale(model: PreTrainedModel, texts: list[Text]) -> list[tuple[Case, list[Text]]]:
    """Train a little, and let the rollout lag one step behind: the first step's tables are of one policy."""
    found, behind = [], scored(model, texts, ALONE)
    parameters = [weight.requires_grad_() for weight in linear(model)]
    for _ in range(N_STEPS):
        found.append(({"rollout": behind, "trainer": (now := scored(model, texts, ALONE)),
                       "control": scored(model, texts, PADDED)}, texts))
        behind = now
        for text in texts[:4]:
            ids = torch.tensor([text.ids])
            model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            for weight in parameters:
                weight -= 2e-3 * weight.grad / weight.grad.norm() * weight.norm()
                weight.grad = None
    for weight in parameters:
        weight.requires_grad_(False)
    return found


def cases(model: PreTrainedModel, texts: list[Text]) -> dict[str, Callable[[], tuple[list, list[Text]]]]:
    """Name every fault of the rollout and how it is scored."""

    def same(**how):
        return lambda: (scored(model, texts, ALONE, **how), texts)

    def under(context: Callable[[], object]):
        def run():
            with context():
                return scored(model, texts, ALONE), texts
        return run

    def other(processed: Processed):
        def run():
            drawn = sampled(model, texts, processed)
            return scored(model, drawn, ALONE, processed), drawn
        return run

    def each(change: Callable[[int, Text], tuple[Text, Callable]]):
        def run():
            given = [change(number, text) for number, text in enumerate(texts)]
            return [scored(model, [text], ALONE, call=call)[0] for text, call in given], texts
        return run

    longest = max(text.n_prompt for text in texts)

    def prompted(text: Text, prompt: list[int]) -> tuple[Text, Callable]:
        return Text([*prompt, *text.ids[text.n_prompt :]], len(prompt)), called

    def before(number: int, text: Text) -> tuple[Text, Callable]:
        neighbour = texts[number - 1]
        return prompted(text, neighbour.ids[: neighbour.n_prompt]) if number % 4 == 3 else (text, called)

    norm = model.model.layers[10].input_layernorm.weight
    return {
        "clean": lambda: (scored(model, texts, Way(6, left=True, chunk=4)), texts),
        "temperature": other(at_temperature(0.7)), "processed: top-p 0.9": other(top_p(0.9)),
        "processed: top-k 20": other(top_k(20)),
        "template": each(lambda _, text: prompted(text, text.ids[text.n_prompt - 12 : text.n_prompt - 5])),
        "left_padding": each(lambda _, text: (text, moved(text, longest - text.n_prompt))),
        "special": each(lambda _, text: (Text([*text.ids[:-1], 0], text.n_prompt), called)),
        "low_precision": same(call=low_head),
        "wrong_from": same(call=seeing(lambda query, key: (query < 64) | (key >= 24))),
        "rope_theta": under(lambda: weights([model.model.rotary_emb.inv_freq], slower)),
        "norm_not_loaded": under(lambda: weights([norm], torch.ones_like)),
        "adapter_not_merged": under(lambda: weights(linear(model), low_rank)),
        "int8_weights": under(lambda: weights(linear(model), in_8_bits)),
        "cache_in_8_bits": under(lambda: hooked(model, lambda kv: kv.to(torch.float8_e4m3fn).to(kv.dtype))),
        "sliding_window": same(call=seeing(lambda query, key: key > query - 48)),
        "sink_evicted": same(call=seeing(lambda query, key: (query < 64) | (key >= 4))),
        "temperature_09": other(at_temperature(0.9)), "top_k_50": other(top_k(50)), "min_p": other(min_p(0.05)),
        "repetition_penalty": same(call=penalized),
        "top_token": same(processed=lambda logits: plain(logits).amax(-1, keepdim=True).expand_as(logits)),
        "prompt_truncated": each(lambda _, text: prompted(text, text.ids[8 : text.n_prompt])),
        "no_first_token": each(lambda _, text: prompted(text, text.ids[1 : text.n_prompt])),
        "foreign_prefix": each(before),
        "dropout": under(lambda: dropping(model)),
        "soft_cap": same(call=capped),
        "softmax_in_bf16": same(processed=lambda logits: logits.bfloat16().log_softmax(-1)),
    }


def rows(case: str, dtype: str, step: int, texts: list[Text], values: Case) -> list[dict]:
    """Write a case as rows, one a token."""
    found = []
    for number, text in enumerate(texts):
        for place, token in enumerate(text.ids[text.n_prompt :]):
            at = {name: float(f"{of[number][place]:.7g}") for name, of in values.items()}
            found.append({"case": case, "dtype": dtype, "step": step, "id": number + step * N_TEXTS,
                          "position": text.n_prompt + place, "token": token} | at)
    return found


def of_several_lengths(tokenizer) -> list[Text]:
    """Take answers that are long enough, each after none to two earlier turns, and end each with its last token."""
    texts = [text for text in answers(tokenizer, N_TOKENS) if len(text.ids) == text.n_prompt + N_TOKENS][: 3 * N_TEXTS]
    found = []
    for number in range(N_TEXTS):
        before = [token for text in texts[N_TEXTS : N_TEXTS + number % 3] for token in text.ids]
        ids = [*before, *texts[number].ids[:-1], tokenizer.eos_token_id]
        found.append(Text(ids, len(before) + texts[number].n_prompt))
    return found


def main() -> None:
    """Make every case that is not done yet, then write them together."""
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in KEPT.read_text("utf-8").splitlines()] if KEPT.exists() else []
    there = {(row["case"], row["dtype"]) for row in done}
    for dtype in DTYPES:
        loaded = loading.load(MODEL, weights=WEIGHTS, dtype=dtype)
        model, texts = loaded.model, of_several_lengths(loaded.tokenizer)
        sound = {"trainer": scored(model, texts, ALONE), "control": scored(model, texts, PADDED)}
        for case, make in cases(model, texts).items():
            if (case, dtype) not in there:
                rollout, given = make()
                others = sound if given is texts else {
                    "trainer": scored(model, given, ALONE), "control": scored(model, given, PADDED)}
                _keep(rows(case, dtype, 0, given, {"rollout": rollout} | others), done)
        if ("stale", dtype) not in there:
            for step, (values, given) in enumerate(stale(model, texts)):
                _keep(rows("stale", dtype, step, given, values), done)
    table = pd.DataFrame(done)
    with gzip.GzipFile(TO, "wb", mtime=0) as to:
        to.write(table.to_csv(index=False, float_format="%.7g").encode())


def _keep(found: list[dict], done: list[dict]) -> None:
    with KEPT.open("a", encoding="utf-8") as to:
        to.writelines(json.dumps(row) + "\n" for row in found)
    done += found


if __name__ == "__main__":
    main()
