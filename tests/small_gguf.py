"""A small Llama written as a GGUF file, with llama.cpp's own writer and the order of rows that llama.cpp wants."""

import json

import numpy as np
from gguf import GGUFWriter


def _paired(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Put rows that a position turns together beside one another, as llama.cpp's converter does."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def tensors(model) -> dict[str, np.ndarray]:
    config = model.config
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    found = {
        "token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for part, name in parts.items():
            matrix = state[f"model.layers.{layer}.{name}.weight"]
            found[f"blk.{layer}.{part}.weight"] = _paired(matrix, heads[part]) if part in heads else matrix
    return found


def write(
    file, model, bpe, *, architecture="llama", without=(), more=None, words=None, pre="llama-bpe", vocabulary=True
):
    """Write a file.

    `without` leaves tensors out, `more` adds some, `words` adds facts to the header, `pre` names the way texts are
    split, and without `vocabulary` there is no tokenizer.
    """
    config = model.config
    writer = GGUFWriter(file, architecture)
    facts = {
        "name": "small", "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "rope_dimension_count": config.hidden_size // config.num_attention_heads,
        "layer_norm_rms_eps": config.rms_norm_eps, "vocab_size": config.vocab_size,
    }
    if vocabulary:
        ids, merges = bpe.get_vocab(), [" ".join(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
        in_order, special = sorted(ids, key=ids.get), {each.content for each in bpe.get_added_tokens_decoder().values()}
        facts |= {
            "tokenizer_model": "gpt2", "tokenizer_pre": pre, "token_list": in_order, "token_merges": merges,
            "token_types": [3 if word in special else 1 for word in in_order],
            "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id,
        }
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in (words or {}).items():
        writer.add_string(name, value)
    for name, matrix in (tensors(model) | (more or {})).items():
        if name not in without:
            writer.add_tensor(name, np.ascontiguousarray(matrix, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
