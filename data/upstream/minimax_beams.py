"""MiniMax's cache when beams change places: the keys move, the states of linear attention stay."""

import torch
import transformers
from transformers import MiniMaxConfig, MiniMaxForCausalLM

torch.manual_seed(0)
config = MiniMaxConfig(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=4, layer_types=["full_attention", "linear_attention"] * 2,
)
model = MiniMaxForCausalLM(config).eval()
cache_class = transformers.models.minimax.modeling_minimax.MiniMaxCache
ids = torch.randint(3, 320, (2, 12))
swap = torch.tensor([1, 0])


@torch.inference_mode()
def off() -> float:
    """Fill a cache with two beams, let them change places, feed four tokens more; compare with one pass."""
    full = model(ids, use_cache=False).logits
    cache = model(ids[swap, :8], use_cache=True).past_key_values
    cache.reorder_cache(swap)
    steps = []
    for token in ids[:, 8:].split(1, 1):
        output = model(token, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    return ((torch.cat(steps, 1) - full[:, 8:]).abs().max() / full.std()).item()


def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
    """Let all layers follow the beams."""
    super(cache_class, self).reorder_cache(beam_idx)
    self.linear_cache = [state if state == [] else state.index_select(0, beam_idx) for state in self.linear_cache]


print(transformers.__version__, f"as it is: largest difference over the spread of the logits {off():.1e}")
cache_class.reorder_cache = reorder_cache
print(transformers.__version__, f"with the states reordered: {off():.1e}")
