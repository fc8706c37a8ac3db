"""Architectures of the stand-ins: one small shape, worn by every family of the documents.

All have 12 layers, width 128, 4 heads, the same vocabulary size and context; they differ in what the families differ in
(position scheme, norm, MLP, grouped or multi queries, parallel attention, tied embeddings).  The MLP width is the one
free number: it brings each family to about 2.5 million parameters.
"""

from transformers import AutoConfig, PretrainedConfig

from kvbook.errors import UserError
from kvbook.models.tokenizers import SPECIAL_TOKENS, VOCABULARY_SIZE, Style

LAYERS, WIDTH, HEADS, CONTEXT_LENGTH = 12, 128, 4, 1024

# The families whose real tokenizers let punctuation lead a word.
_LLAMA3_STYLE = {"llama", "qwen2"}
FAMILIES = ("gpt2", "llama", "qwen2", "smollm2", "mpt", "falcon", "roberta")


def tokenizer_style(family: str) -> Style:
    """Name the pre-tokenizer that a family's stand-in uses."""
    return "llama3" if family in _LLAMA3_STYLE else "gpt2"


def config(family: str) -> PretrainedConfig:
    """Return the stock transformers configuration of a family's stand-in."""
    if family not in FAMILIES:
        raise UserError(f"no stand-in for {family!r}: choose one of {', '.join(FAMILIES)}")
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    end, pad = ids["<|endoftext|>"], ids["<pad>"]
    size = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "max_position_embeddings": CONTEXT_LENGTH}
    shared = {"num_key_value_heads": HEADS // 2, "rms_norm_eps": 1e-5}
    own = {
        "gpt2": {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
                 "n_positions": CONTEXT_LENGTH, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "llama": {"model_type": "llama", **size, **shared, "num_key_value_heads": HEADS, "intermediate_size": 320,
                  "tie_word_embeddings": False, "bos_token_id": ids["<|begin_of_text|>"]},
        "qwen2": {"model_type": "qwen2", **size, **shared, "intermediate_size": 352, "tie_word_embeddings": False},
        "smollm2": {"model_type": "llama", **size, **shared, "intermediate_size": 384, "tie_word_embeddings": True},
        # MPT's own default is use_cache=False, the trap of the document blog-past; a stand-in that other chapters can
        # use ships with the cache on.
        "mpt": {"model_type": "mpt", "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS,
                "max_seq_len": CONTEXT_LENGTH, "use_cache": True},
        "falcon": {"model_type": "falcon", **size, "multi_query": True, "parallel_attn": True, "alibi": False,
                   "bias": False, "new_decoder_architecture": False, "ffn_hidden_size": 5 * WIDTH},
        "roberta": {
            "model_type": "roberta", **size, "bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"],
            "intermediate_size": 4 * WIDTH,
            # Position ids start after the padding id, and the two ends of a text take a place each.
            "max_position_embeddings": CONTEXT_LENGTH + pad + 1, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
        },
    }
    common = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    return AutoConfig.for_model(**common | own[family])
