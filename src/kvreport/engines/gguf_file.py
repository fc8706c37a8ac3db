"""A model of transformers as a file in GGUF, for engines that read no other."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

# What the format calls a file of these, and in which numbers it keeps matrices.
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}


def write_gguf(model: PreTrainedModel, file: Path, tokenizer: Path | None = None) -> Path:
    """Write a Llama model's weights as a GGUF file in their own dtype, norms in fp32; without a tokenizer ids are fed.

    `tokenizer` is a ``tokenizer.json`` of SmolLM's kind, whose words llama.cpp cuts as ``smollm``.
    """
    import gguf

    config, weights = model.config, model.state_dict()
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    kind = gguf.GGMLQuantizationType[kinds[model.dtype]]
    writer = gguf.GGUFWriter(file, "llama")
    for say, value in {
        writer.add_context_length: config.max_position_embeddings, writer.add_embedding_length: config.hidden_size,
        writer.add_block_count: config.num_hidden_layers, writer.add_feed_forward_length: config.intermediate_size,
        writer.add_head_count: config.num_attention_heads, writer.add_head_count_kv: config.num_key_value_heads,
        writer.add_rope_dimension_count: config.head_dim,
        writer.add_rope_freq_base: config.rope_parameters["rope_theta"],
        writer.add_layer_norm_rms_eps: config.rms_norm_eps, writer.add_vocab_size: config.vocab_size,
        writer.add_file_type: _FILE_TYPES[model.dtype],
    }.items():
        say(value)
    if tokenizer:
        _add_tokenizer(writer, json.loads(tokenizer.read_text("utf-8")), config.eos_token_id)
    else:
        writer.add_tokenizer_model("no_vocab")

    def add(name: str, weight: torch.Tensor, heads: int = 0) -> None:
        values = weight.float()
        if heads:
            # llama.cpp turns neighbouring numbers of a head, transformers its two halves.
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        numbers = values.contiguous().numpy()
        if weight.ndim == 1:
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    if not config.tie_word_embeddings:
        add("output.weight", weights["lm_head.weight"])
    parts = {
        "attn_norm": "input_layernorm", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config.num_hidden_layers):
        of = f"model.layers.{layer}."
        for theirs, ours in parts.items():
            add(f"blk.{layer}.{theirs}.weight", weights[f"{of}{ours}.weight"])
        add(f"blk.{layer}.attn_q.weight", weights[f"{of}self_attn.q_proj.weight"], config.num_attention_heads)
        add(f"blk.{layer}.attn_k.weight", weights[f"{of}self_attn.k_proj.weight"], config.num_key_value_heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, content: dict[str, Any], end: int) -> None:
    import gguf

    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    pieces = {place: piece for piece, place in content["model"]["vocab"].items()} | special
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([pieces[place] for place in sorted(pieces)])
    writer.add_token_types([kinds[place in special] for place in sorted(pieces)])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
