"""Tiny configurations of every causal architecture, by rules on the names of a configuration's fields.

A rule speaks of a field's meaning and holds for every architecture that has the field.  What one architecture alone
demands stands in `kvbook.atlas.exceptions`.  Windows are shorter than the text, latent attention keeps unequal head
widths, and of every kind of layer at least one is kept.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvbook import older
from kvbook.atlas.exceptions import EXCEPTIONS
from kvbook.atlas.names import WINDOW
from kvbook.errors import UserError
from kvbook.measuring.in_fp64 import widened

LAYERS = 4
VOCABULARY = 320
# Standard deviation of the weights: large enough that every layer changes the logits, small enough that none saturates.
_SPREAD = 0.1

_SIZES: dict[str, int] = {
    name: value
    for value, listed in (
        (VOCABULARY, "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input "
            "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base"),
        (128, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_source_positions "
            "max_target_positions context_length rel_extent position_bias_max_distance relative_max_distance"),
        (64, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim "
            "input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim "
            "backbone_hidden_size lru_width attention_hidden_size dim_model_base prompt_mid_dim ple_embed_dim "
            "hidden_size_global"),
        (96, "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim dff dim_ff d_inner ffn_hidden_size n_inner "
            "shared_intermediate_size intermediate_size_mlp dense_intermediate_size feed_forward_size"),
        (32, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size q_lora_rank "
            "expert_ffn_hidden_size moe_shared_expert_intermediate_size o_lora_rank image_size vision_output_dim"),
        # The cache's length is read from the encoder's field in classes that share a configuration.
        (LAYERS, "num_hidden_layers decoder_layers n_layer n_layers num_layers num_blocks num_decoder_layers "
            "encoder_layers num_encoder_layers"),
        (4, "num_attention_heads decoder_attention_heads encoder_attention_heads n_head n_heads num_heads "
            "attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
            "num_kv_heads linear_num_heads num_experts n_routed_experts num_local_experts moe_num_experts "
            "mamba_n_heads n_mamba_heads mamba_num_heads linear_num_value_heads index_n_heads num_query_groups "
            "patch_size"),
        (2, "num_key_value_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
            "linear_num_key_heads zero_expert_num mamba_n_groups n_groups mamba_ngroups o_groups depth "
            "num_global_layers"),
        (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts "
            "num_dense_layers first_k_dense_replace num_nextn_predict_layers n_input_layers n_output_layers"),
        (16, "head_dim swa_head_dim attention_head_dim attention_head_size d_head kv_channels linear_key_head_dim "
            "linear_value_head_dim linear_head_dim dim_head v_head_dim qk_nope_head_dim kv_lora_rank "
            "index_head_dim mamba_d_head mamba_head_dim hidden_size_per_layer_input laurel_rank gated_norm_rank "
            "global_head_dim hc_lowrank"),
        (8, "qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size time_step_rank mamba_dt_rank "
            "index_topk adapter_rank router_hidden_size swa_rope_head_dim"),
        (WINDOW, "sliding_window window_size local_attention sliding_window_size attention_chunk_size chunk_size "
            "attention_window_size mamba_chunk_size keep_window_size local_attn_chunk_length "
            "lsh_attn_chunk_length local_attention_window_len index_block_size"),
    )
    for name in listed.split()
}

# Where a default of None would be made from the true sizes, or leaves a class unable to build.
_WHERE_NONE = {"head_dim": 16, "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1,
               "num_experts_per_tok": 2}
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
    wanted = dict.fromkeys([last, *firsts, *range(last)])
    return sorted(list(wanted)[: max(count, 1 + len(firsts))])


def _shrunk(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """Shrink a configuration's fields, those of its parts included."""
    given = EXCEPTIONS.get(kind.model_type, {})
    default = kind()
    stated = {key: value for key, value in default.__dict__.items() if not key.startswith("_")}
    # Before release 5.4 a configuration is a plain class.
    plain = not dataclasses.is_dataclass(kind)
    fields = set(inspect.signature(kind).parameters if plain else (field.name for field in dataclasses.fields(kind)))
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
    }
    # A list of all layers' numbers tells nothing of any of them.
    numbers = {key for key, value in lists.items() if value == list(range(len(value)))}
    if not lists.keys() - numbers:
        return {}
    kept = kept_layers([value for key, value in lists.items() if key not in numbers])
    return {key: [value[index] for index in kept] for key, value in lists.items() if key not in numbers} | {
        key: len(kept) for key in ("num_hidden_layers", "num_layers") if key in found
    }


def configuration(name: str) -> PretrainedConfig:
    """Make the tiny configuration of a model type, or of the part of it that its causal class reads."""
    kind = CONFIG_MAPPING[name]
    parts = {part.model_type: part for part in kind.sub_configs.values() if hasattr(part, "model_type")}
    wanted = _class(name).config_class
    if wanted is not kind and getattr(wanted, "model_type", None) in parts:
        kind = wanted
    return kind(**_shrunk(kind))


def _class(name: str) -> type[PreTrainedModel]:
    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]
    return found if isinstance(found, type) else found[0]


def build(
    name: str, dtype: torch.dtype = torch.float32, experts: str | None = None, device: str = "cpu"
) -> PreTrainedModel:
    """Build a tiny model with seeded random weights."""
    config = configuration(name)
    torch.manual_seed(4)
    options = {"experts_implementation": experts} if experts else {}
    # In fp64 what a class computes once, such as decays, must not have the roundoff of fp32.
    with widened(dtype):
        model = _class(name)._from_config(config, **{older.DTYPE: dtype}, **options)
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
