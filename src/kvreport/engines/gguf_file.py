"""A model of transformers as a file in GGUF, for engines that read no other."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

# What the format calls the numbers of a matrix, and a file of these.
_KINDS = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 32)}


def write_gguf(model: PreTrainedModel, file: Path, tokenizer: Path | None = None) -> Path:
    """Write a Llama model's weights as a GGUF file in their own dtype, norms in fp32; without a tokenizer ids are fed.

    `tokenizer` is a ``tokenizer.json`` of SmolLM's kind, whose words llama.cpp cuts as ``smollm``.
    """
    import gguf

    config, (kind, file_type) = model.config, _KINDS[model.dtype]
    writer = gguf.GGUFWriter(file, "llama")
    for say, value in {
        writer.add_context_length: config.max_position_embeddings, writer.add_embedding_length: config.hidden_size,
        writer.add_block_count: config.num_hidden_layers, writer.add_feed_forward_length: config.intermediate_size,
        writer.add_head_count: config.num_attention_heads, writer.add_head_count_kv: config.num_key_value_heads,
        writer.add_rope_dimension_count: config.head_dim,
        writer.add_rope_freq_base: config.rope_parameters["rope_theta"],
        writer.add_layer_norm_rms_eps: config.rms_norm_eps, writer.add_vocab_size: config.vocab_size,
        writer.add_file_type: file_type,
    }.items():
        say(value)
    if tokenizer:
        _add_tokenizer(writer, json.loads(tokenizer.read_text("utf-8")), config.eos_token_id)
    else:
        writer.add_tokenizer_model("no_vocab")
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        part, values = name.split(".")[-2], weight.float()
        if part == "lm_head" and config.tie_word_embeddings:
            continue
        if part in heads:
            # llama.cpp turns neighbouring numbers of a head, transformers its two halves.
            values = values.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
        kept_as = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else kind]
        numbers = gguf.quants.quantize(values.contiguous().numpy(), kept_as)
        writer.add_tensor(theirs.get_name(name, (".weight",)), numbers, raw_dtype=kept_as)
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
