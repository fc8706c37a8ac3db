"""What single architectures demand of a tiny configuration, beyond the rules for all."""

from typing import Any

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_ROTARY = {"rope_type": "default", "rope_theta": 1e4}


def _of(demanded: dict[str, Any], names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {name: dict(demanded) for name in names}


# By model type of a configuration, or of a part of one.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # Masked models are causal only when told so.
    **_of(
        {"is_decoder": True},
        ("bert", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta",
         "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "bert-generation"),
    ),
    # With few heads many keys have a score of exactly zero, and which of them are chosen is left to chance.
    **_of({"index_n_heads": 32}, ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")),
    "deepseek_v4": {"index_n_heads": 32, "layer_types": ["sliding_attention", "compressed_sparse_attention",
                                                         "heavily_compressed_attention", "sliding_attention"]},
    # The widths of its sliding layers have fields of no declared type.
    "dots3_note_text": {
        "index_n_heads": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
    },
    # Its sparse attention reads no cache.
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32], "num_buckets": 4},
    # A state space's heads and their width make up its inner size, twice the model's.
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_head": 32, "mamba_d_ssm": 128},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["mamba", "attention"] * 2},
    "mamba2": {"head_dim": 32},
    "nemotron_h": {"mamba_head_dim": 32},
    # Every second layer attends, else four layers hold none that does.
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    # Layers that share another one's keys must have one of each kind before them.
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _ALTERNATING, "num_hidden_layers": 4,
                     "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5] * 4},
    **_of({"num_kv_shared_layers": 2, "layer_types": _ALTERNATING, "num_hidden_layers": 4, "use_double_wide_mlp": True},
          ("gemma4_text", "gemma4_unified_text")),
    "gemma4_unified_assistant": {"text_config": {"layer_types": _ALTERNATING}},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8},
    # Its attention layers share one set of weights, so there must be two.
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_dt_rank": 8, "attention_hidden_size": 128,
              "attention_head_dim": 32},
    "cohere_compass_text": {"layer_types": _ALTERNATING,
                            "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROTARY)},
    # By default all layers are of one kind, or one kind is left out.
    **_of({"layer_types": ["conv", "full_attention"] * 2}, ("lfm2", "lfm2_moe")),
    **_of({"layer_types": _ALTERNATING}, ("dots1", "ministral", "laguna", "mellum")),
    **_of({"layer_types": _ALTERNATING, "use_sliding_window": True, "sliding_window": 8},
          ("qwen2", "qwen2_moe", "qwen3", "smollm3")),
    # Without a window by default: the branch that a cache can get wrong is the one with it.
    **_of({"sliding_window": 8}, ("minimax", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2")),
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 8},
    # Its adapters are as wide as its queries, which read the embedding beside the hidden state.
    "zamba2": {"use_shared_attention_adapter": True, "num_key_value_heads": 4, "attention_head_dim": 32},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    # Widths are rounded up to multiples of 64, and a step's kernel wants its queries to fill one.
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    # Each codebook is read as a text of its own.
    "musicgen_decoder": {"num_codebooks": 1}, "musicgen_melody_decoder": {"num_codebooks": 1},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None, "prefix_lm": False},
}
