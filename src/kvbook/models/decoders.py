"""An encoder-decoder as its decoder after one source text, so that it is called as a causal model is."""

from typing import Any

import torch
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, Cache, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

# Tokens of the source; the ids from the first on are no special tokens in most vocabularies.
SOURCE = 16
_FIRST = 10


def has_encoder(config: PretrainedConfig) -> bool:
    """Tell whether a configuration is of an encoder of text with its decoder."""
    return getattr(config, "is_encoder_decoder", False) and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def behind_a_source(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's forward take the tokens of its decoder alone; what its encoder says of the source is kept."""
    both = model.forward
    source = torch.arange(_FIRST, _FIRST + SOURCE, device=model.device) % model.config.vocab_size
    with torch.no_grad():
        heard = model.get_encoder()(source[None]).last_hidden_state

    def forward(
        input_ids: torch.Tensor, past_key_values: Cache | None = None, attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None, output_hidden_states: bool = False,
    ) -> Any:
        encoded = BaseModelOutput(last_hidden_state=heard.expand(input_ids.shape[0], -1, -1))
        output = both(
            encoder_outputs=encoded, decoder_input_ids=input_ids, decoder_attention_mask=attention_mask,
            past_key_values=past_key_values, use_cache=use_cache, output_hidden_states=output_hidden_states,
        )
        cache, states = output.past_key_values, output.decoder_hidden_states if output_hidden_states else None
        return CausalLMOutputWithPast(logits=output.logits, past_key_values=cache, hidden_states=states)

    model.forward = forward
    return model
