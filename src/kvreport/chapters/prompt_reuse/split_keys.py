"""The forum thread's first example: keys and values of a text fed whole, compared with the same text fed in two parts.

The thread counts the elements of the first layer's keys that differ.  Here every layer is compared, keys and values,
the prompt's rows and the response's apart, and each count comes with how far the elements are apart.  Three switches
isolate the cause.  The prompt's cache is overwritten by random numbers: does what is compared depend on it at all?  It
is taken from the whole pass: does the difference arise in the prompt's own pass, or in the response's?  Every linear
layer gets as many rows as in the whole pass: is it the query length?  A last variant sets the last two together.

The first layer is compared at its true width too: which query lengths change its keys?  They are the embedding, a norm,
one linear layer and a rotation: nothing cached enters them.  So the thread's comparison needs no weights and no other
layer.  transformers' own classes are built with the documents'
width and key heads, one layer and random weights; vocabulary, MLP and number of query heads are small, for they lie
outside of what is compared.  They run on random ids of the published lengths; then with the same text cut elsewhere, so
that the second part has other lengths.

Rows, one a (model, dtype, variant, layer, tensor, part), and one a (shape, dtype, variant, length, part): see
``data/README.md``.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvbook.measuring import agreement, caches, full_and_split
from kvbook.models import kept, loading, placement, registry
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer, samples
from kvreport.chapters.prompt_reuse import PromptReuseSettings
from kvreport.chapters.prompt_reuse import rows as named
from kvreport.publishing import documents

# Tokens of the thread's prompt and response, more or less, in any vocabulary.
_ABOUT_TOKENS = 70


def posted_ids(tokenizer: PreTrainedTokenizerBase, one_begin: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode the thread's prompt and response as its script does."""
    texts = documents.published(named.DOCUMENT)["split"]
    if tokenizer.chat_template is None:
        prompt = tokenizer(texts["prompt"])["input_ids"]
    else:
        turn = [{"role": "user", "content": texts["prompt"]}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
    response = tokenizer(texts["response"], add_special_tokens=not one_begin)["input_ids"]
    return torch.tensor([prompt]), torch.tensor([response])


@contextmanager
def as_many_rows(model: PreTrainedModel, fed: slice, total: int) -> Iterator[None]:
    """Let every linear layer compute as many rows as in the whole pass: those fed at their place, the others zero."""

    def widen(_, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = arguments
        wide = x.new_zeros(x.shape[0], total, x.shape[2])
        wide[:, fed] = x
        return (wide,)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(lambda _module, _arguments, rows: rows[:, fed]).remove)
        yield


def overwrite(cache: Cache, seed: int) -> None:
    """Replace every cached key and value by a random number of the same scale, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in full_and_split.states_of(cache):
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_((noise * tensor.float().std().cpu()).to(tensor.dtype))


def in_one_pass(model: PreTrainedModel, ids: torch.Tensor) -> Cache:
    """Feed a text whole, into a cache whose windows keep all of it."""
    return model(ids, past_key_values=caches.recording(model.config), use_cache=True).past_key_values


def in_two_parts(
    model: PreTrainedModel, ids: torch.Tensor, n_prompt: int, variant: str = named.POSTED, seed: int = 0
) -> Cache:
    """Feed a text's first tokens into a cache and the others on top of it."""
    total = ids.shape[1]

    def feed(part: slice, cache: Cache) -> Cache:
        widened = variant in (named.FULL_ROWS, named.BOTH)
        with as_many_rows(model, part, total) if widened else nullcontext():
            return model(ids[:, part], past_key_values=cache, use_cache=True).past_key_values

    if variant in (named.WHOLE_CACHE, named.BOTH):
        cache = in_one_pass(model, ids)
        cache.crop(n_prompt - total)
    else:
        cache = feed(slice(0, n_prompt), caches.recording(model.config))
    if variant == named.OVERWRITTEN:
        overwrite(cache, seed)
    return feed(slice(n_prompt, total), cache)


def compare(whole: Cache, split: Cache, n_prompt: int) -> Rows:
    """Yield one row for each layer, tensor and part of the text, from the first token that both caches still hold."""
    for layer, (one, other) in enumerate(zip(whole.layers, split.layers, strict=True)):
        for tensor in ("keys", "values"):
            first, second = getattr(one, tensor).cpu(), getattr(other, tensor).cpu()
            # A layer with a window, once its cache was cut back, holds no more than the window of what is left.
            forgotten = first.shape[2] - second.shape[2]
            first, response = first[:, :, forgotten:], n_prompt - forgotten
            for part, rows in (("prompt", slice(None, response)), ("response", slice(response, None))):
                about = {"layer": layer, "tensor": tensor, "part": part}
                yield about | difference(first[:, :, rows], second[:, :, rows])


def difference(reference: torch.Tensor, other: torch.Tensor) -> Row:
    """Compare two tensors element by element, as one flat vector."""
    apart = agreement.ulps(reference, other).flatten()
    differing = apart[apart > 0]
    drift = agreement.drift(reference.flatten(), other.flatten())
    return {
        "n_elements": apart.numel(), "n_differing": differing.numel(),
        "median_ulps": differing.median().item() if differing.numel() else None, "max_ulps": apart.max().item(),
        "max_abs": drift.max_abs.item(), "relative_rms": drift.relative_rms.item(),
    }


def inputs(settings: PromptReuseSettings) -> Inputs:
    """Name the models and the thread's texts, and refuse what cannot be run."""
    models = samples.identities(settings, (settings.model, settings.second_model))
    for model in models:
        tokenizer = kept.tokenizer(model["asked_for"], samples.weights_of(settings, model["asked_for"]))
        loading.check_length(model, sum(part.shape[1] for part in posted_ids(tokenizer)))
    return {"texts": documents.published(named.DOCUMENT)["split"], "models": models}


def measure(settings: PromptReuseSettings, made_of: Inputs, writer: Writer) -> None:
    """Compare whole and in two parts for every model, dtype and variant."""
    names = [model["asked_for"] for model in made_of["models"]]
    units = {f"{name}|{dtype}": (name, dtype) for name in names for dtype in settings.dtypes}
    for unit, (name, dtype) in writer.pending(units, "whole and in two parts: model and dtype"):
        loaded = samples.load(settings, name, dtype)
        writer.keep(unit, loaded.about, _rows(loaded, settings.seed))


def _rows(loaded: loading.Loaded, seed: int) -> Rows:
    for variant in named.VARIANTS:
        prompt, response = posted_ids(loaded.tokenizer, one_begin=variant == named.ONE_BEGIN)
        ids, n_prompt = torch.cat([prompt, response], dim=1).to(loaded.model.device), prompt.shape[1]
        whole, split = in_one_pass(loaded.model, ids), in_two_parts(loaded.model, ids, n_prompt, variant, seed)
        about = {"variant": variant, "n_prompt": n_prompt, "n_response": response.shape[1]}
        yield from (about | row for row in compare(whole, split, n_prompt))


def work(settings: PromptReuseSettings) -> Work:
    """Count the passes of each model in each dtype."""
    return Work(_ABOUT_TOKENS, 2 * len(named.VARIANTS), dtypes=settings.dtypes)


EXPERIMENT = Experiment(
    "split_keys", PromptReuseSettings, inputs, measure,
    fields=frozenset({"model", "second_model", "weights", "device", "seed", "dtypes"}), work=work,
)


# Tokens of the second part, besides the published number.
_LENGTHS = (1, 2, 3, 4, 8, 16, 32)
_VOCABULARY_SIZE, _MLP_WIDTH = 256, 64


def shape_of(hub_id: str) -> dict[str, Any]:
    """Look up the true architecture with a hub id."""
    architectures = (one for family in registry.families().values() for one in family.architectures)
    return next(dict(one.config) for one in architectures if one.hub_id == hub_id)


def build(hub_id: str, dtype: torch.dtype, device: torch.device, seed: int) -> torch.nn.Module:
    """Build the first layer of an architecture, with random weights."""
    true = shape_of(hub_id)
    values = true | {
        "num_hidden_layers": 1, "head_dim": true["hidden_size"] // true["num_attention_heads"],
        "num_attention_heads": true["num_key_value_heads"], "vocab_size": _VOCABULARY_SIZE,
        "intermediate_size": _MLP_WIDTH,
    }
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def inputs_of_first_layer(settings: PromptReuseSettings) -> Inputs:
    """Name the document's shapes and counts, and refuse a device or dtype that is not there."""
    placement.check(settings.device, settings.dtypes)
    counts = documents.published(named.DOCUMENT)["split"]["counts"]
    return {"shapes": {count["hub_id"]: shape_of(count["hub_id"]) for count in counts}, "counts": counts}


def _first_keys(model: torch.nn.Module, ids: torch.Tensor, lengths: list[int]) -> Rows:
    total, whole = ids.shape[1], in_one_pass(model, ids)
    for length, variant in itertools.product(lengths, (named.POSTED, named.FULL_ROWS)):
        split = in_two_parts(model, ids, total - length, variant)
        about = {"variant": variant, "n_tokens": total, "rows_fed": length}
        yield from (about | row for row in compare(whole, split, total - length) if row["tensor"] == "keys")


def measure_first_layer(settings: PromptReuseSettings, made_of: Inputs, writer: Writer) -> None:
    """Compare the first layer's keys at every length of the second part, for the document's two shapes."""
    device = placement.device_of(settings.device)
    units = {f"{count['hub_id']}|{name}": (count, name) for count in made_of["counts"] for name in settings.dtypes}
    for unit, (count, name) in writer.pending(units, "first layer at its true width: shape and dtype"):
        model = build(count["hub_id"], placement.dtype_on(name, device), device, settings.seed)
        total = count["prompt_tokens"] + count["response_tokens"]
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(_VOCABULARY_SIZE, (1, total), generator=generator).to(device)
        about = {"shape": count["hub_id"], "weights": "random", "dtype": name}
        writer.keep(unit, about, _first_keys(model, ids, sorted({*_LENGTHS, count["response_tokens"]})))


FIRST_LAYER = Experiment(
    "first_layer", PromptReuseSettings, inputs_of_first_layer, measure_first_layer,
    fields=frozenset({"device", "seed", "dtypes"}),
)
