"""The library in this process, without a server, asked as the engines are."""

import torch
from transformers import DynamicCache, PreTrainedModel

from kvbook.measuring import choosing
from kvreport.chapters.serving_engines.asking import TOP, Written
from kvreport.chapters.serving_engines.rows import BLOCK


@torch.inference_mode()
def write(model: PreTrainedModel, prompts: list[list[int]], tokens: int, warm: bool = False) -> list[Written]:
    """Continue prompts together; warm ones compute only what follows the last whole block of a prefix cache."""
    cache, ids = DynamicCache(config=model.config), torch.tensor(prompts, device=model.device)
    cached = (ids.shape[1] - 1) // BLOCK * BLOCK if warm else 0
    if cached:
        model(ids[:, :cached], past_key_values=cache)
    found = [Written([], [], [], cached) for _ in prompts]
    for _, logits, chosen in choosing.written(model, ids[:, cached:], tokens, cache):
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        best = logs.topk(min(TOP, logs.shape[-1]))
        for row, one in enumerate(found):
            if not one.tokens or one.tokens[-1] not in choosing.ends_of(model):
                one.tokens.append(int(chosen[row]))
                one.logprobs.append(float(logs[row, chosen[row]]))
                one.top.append(dict(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)))
    return found


@torch.inference_mode()
def read(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of every token at each place of a text, by one pass without a cache."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    return model.get_output_embeddings()(hidden).log_softmax(-1)
