"""Tiny configurations of every causal architecture, by rules on the names of a configuration's fields.

A rule speaks of a field's meaning and holds for every architecture that has the field.  The table beside this module
has the sizes, and what one architecture alone demands.  Windows are shorter than the text, latent attention keeps
unequal head widths, and of every kind of layer at least one is kept.
"""

import difflib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvbook import UserError, older
from kvbook.atlas import WINDOW
from kvbook.measuring.in_fp64 import widened
from kvbook.settings import read_yaml

LAYERS = 4
VOCABULARY = 320
# Standard deviation of the weights: large enough that every layer changes the logits, small enough that none saturates.
_SPREAD = 0.1

_TABLES = read_yaml(Path(__file__).with_suffix(".tables.yaml"))
_NAMED_SIZES = {"vocabulary": VOCABULARY, "layers": LAYERS, "window": WINDOW}
_SIZES = {name: _NAMED_SIZES.get(size, size) for size, of in _TABLES["sizes"].items() for name in of.split()}
_WHERE_NONE = _TABLES["where_none"]
_EXCEPTIONS = {name: one["demand"] for one in _TABLES["exceptions"] for name in one["types"].split()}
_SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}


def names() -> list[str]:
    """List the model types of every causal architecture that the installed transformers has."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def known(asked: Iterable[str]) -> list[str]:
    """List model types once each; refuse one that transformers does not list as causal."""
    for name in asked:
        if name not in names():
            near = difflib.get_close_matches(name.lower(), names(), n=1)
            hint = f"did you mean {near[0]}?" if near else f"`kvbook atlas` without names looks at all {len(names())}"
            raise UserError(f"transformers has no causal model type {name!r}: {hint}")
    return list(dict.fromkeys(asked))


def class_of(name: str) -> str:
    """Name the class that a model type loads as a causal language model."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    return found if isinstance(found, str) else found[0]


def text(length: int, seed: int = 5) -> torch.Tensor:
    """Draw token ids of int64, shape (1, length), away from the special ones."""
    return torch.randint(16, VOCABULARY - 16, (1, length), generator=torch.Generator().manual_seed(seed))


def kept_layers(per_layer: list[list[Any]], count: int = LAYERS) -> list[int]:
    """Choose layers so that every kind is among them, and the last one stays the last."""
    kinds = [tuple(map(repr, layer)) for layer in zip(*per_layer, strict=True)]
    last = len(kinds) - 1
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds) if kind != kinds[last]]
    return sorted(list(dict.fromkeys([last, *firsts, *range(last)]))[: max(count, 1 + len(firsts))])


def _shrunk(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """Shrink a configuration's fields, those of its parts included."""
    given = _EXCEPTIONS.get(kind.model_type, {})
    stated = {key: value for key, value in kind().__dict__.items() if not key.startswith("_")}
    # Before release 5.4 a configuration is a plain class, and no dataclass.
    fields = set(inspect.signature(kind).parameters)
    found: dict[str, Any] = {}
    for key in fields:
        value = stated.get(key)
        if isinstance(value, PretrainedConfig):
            found[key] = _shrunk(type(value))
        elif key in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            found[key] = _SIZES[key]
        elif value is None and key in _WHERE_NONE:
            found[key] = _WHERE_NONE[key]
        elif key.endswith("_token_id") and isinstance(value, int | list):
            found[key] = _SPECIAL.get(key.removesuffix("_token_id"), 3)
        elif key.endswith("_token_index") and isinstance(value, int):
            found[key] = 3
    found |= _by_layer(stated, fields, found)
    if "kv_lora_rank" in fields:
        # Latent attention shares no keys between heads, and its "head width" is that of the rotary part.
        found |= {key: value for key, value in (("num_key_value_heads", 4), ("head_dim", 8)) if key in found}
    return found | given


def _by_layer(stated: dict[str, Any], fields: set[str], found: dict[str, Any]) -> dict[str, Any]:
    depth = stated.get("num_hidden_layers")
    lists = {
        key: list(value) for key, value in stated.items()
        if key in fields and isinstance(value, list | tuple) and depth and len(value) == depth > 1
        # A list of all layers' numbers tells nothing of any of them.
        and list(value) != list(range(depth))
    }
    if not lists:
        return {}
    kept = kept_layers(list(lists.values()))
    depths = {key: len(kept) for key in ("num_hidden_layers", "num_layers") if key in found}
    return {key: [value[index] for index in kept] for key, value in lists.items()} | depths


def configuration(name: str) -> PretrainedConfig:
    """Make the tiny configuration of a model type, or of the part of it that its causal class reads."""
    kind, wanted = CONFIG_MAPPING[name], _class(name).config_class
    kind = wanted if wanted in kind.sub_configs.values() else kind
    return kind(**_shrunk(kind))


def _class(name: str) -> type[PreTrainedModel]:
    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]
    return found if isinstance(found, type) else found[0]


def build(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """Build a tiny model with seeded random weights."""
    config = configuration(name)
    torch.manual_seed(4)
    # In fp64 what a class computes once, such as decays, must not have the roundoff of fp32.
    with widened(dtype):
        model = _class(name)._from_config(config, **{older.DTYPE: dtype})
    _draw(model)
    return model.eval().requires_grad_(False).to(device)


@torch.no_grad()
def _draw(model: PreTrainedModel) -> None:
    """Draw matrices anew, and shake what a class sets to zeros or ones, so that nothing is without effect."""
    generator = torch.Generator().manual_seed(7)
    for _, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32) * _SPREAD
        if weight.dim() > 1:
            weight.copy_(noise)
        else:
            # Some classes leave a vector as it was allocated.
            weight.copy_(torch.nan_to_num(weight, 0.0, 0.0, 0.0).clamp(-8, 8) + noise)
