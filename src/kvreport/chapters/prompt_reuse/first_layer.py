"""The forum thread's first layer at its true width: which query lengths change the keys.

The keys of the first layer are the embedding, a norm, one linear layer and a rotation: nothing cached enters them.  So
the thread's comparison needs no weights and no other layer.  transformers' own classes are built with the documents'
width and key heads, one layer and random weights; vocabulary, MLP and number of query heads are small, for they lie
outside of what is compared.  They run on random ids of the published lengths; then with the same text cut elsewhere, so
that the second part has other lengths.

Rows, one a (shape, dtype, variant, length, part): see ``data/README.md``.
"""

import itertools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbook.models import placement, registry
from kvbook.runs import Experiment, Inputs, Rows, Writer
from kvreport.chapters.prompt_reuse import rows as named
from kvreport.chapters.prompt_reuse import split_keys
from kvreport.chapters.prompt_reuse.settings import PromptReuseSettings
from kvreport.publishing import documents

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


def inputs(settings: PromptReuseSettings) -> Inputs:
    """Name the document's shapes and counts, and refuse a device or dtype that is not there."""
    placement.check(settings.device, settings.dtypes)
    counts = documents.published(named.DOCUMENT)["split"]["counts"]
    return {"shapes": {count["hub_id"]: shape_of(count["hub_id"]) for count in counts}, "counts": counts}


def _rows(model: torch.nn.Module, ids: torch.Tensor, lengths: list[int]) -> Rows:
    total, whole = ids.shape[1], model(ids, use_cache=True).past_key_values
    for length, variant in itertools.product(lengths, (named.POSTED, named.FULL_ROWS)):
        split = split_keys.in_two_parts(model, ids, total - length, variant)
        about = {"variant": variant, "n_tokens": total, "rows_fed": length}
        compared = split_keys.compare(whole, split, total - length)
        yield from (about | row for row in compared if row["tensor"] == "keys")


def measure(settings: PromptReuseSettings, made_of: Inputs, writer: Writer) -> None:
    """Compare the first layer's keys at every length of the second part, for the document's two shapes."""
    device = placement.device_of(settings.device)
    units = {f"{count['hub_id']}|{name}": (count, name) for count in made_of["counts"] for name in settings.dtypes}
    for unit, (count, name) in writer.pending(units, "first layer at its true width: shape and dtype"):
        model = build(count["hub_id"], placement.dtype_on(name, device), device, settings.seed)
        total = count["prompt_tokens"] + count["response_tokens"]
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(_VOCABULARY_SIZE, (1, total), generator=generator).to(device)
        about = {"shape": count["hub_id"], "weights": "random", "dtype": name}
        lengths = sorted({*_LENGTHS, count["response_tokens"]})
        writer.keep(unit, about, _rows(model, ids, lengths))


EXPERIMENT = Experiment("first_layer", PromptReuseSettings, inputs, measure, frozenset({"device", "seed", "dtypes"}))
