"""The loop by which the model goes on from prompts: a cache or none, padding or none, one text or several together.

A choice is the largest logit, or the largest of logit + Gumbel noise, which is a sample at temperature 1.  The noise
depends on seed, text and step alone, so two runs that sample differently do so because of their logits.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvbook.measuring import caches, choosing, predictions
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter.variants import positions


class Step(NamedTuple):
    """One choice.

    Attributes
    ----------
    token : int
        What was chosen.
    scores : Tensor, shape (vocabulary_size,)
        What it is the largest of.
    """

    token: int
    scores: torch.Tensor


class Chooser(NamedTuple):
    """Chooses tokens from logits, greedily or with random numbers that all ways share.

    Attributes
    ----------
    choice : {"greedy", "sampled"}
        The largest logit, or the largest of logit and Gumbel noise.
    seed : int
        Of the noise.
    """

    choice: str
    seed: int

    def __call__(self, logits: torch.Tensor, text: int, step: int) -> Step:
        """Choose from one row."""
        if self.choice != named.GREEDY:
            (logits,) = predictions.noisy(logits[None], self.seed, [text], step)
        return Step(choosing.greedy(logits).item(), logits)


def write(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], samples: Sequence[int], n_new: int, choose: Chooser,
    cache: str = named.DYNAMIC, padding: str = named.UNPADDED, width: int = 0,
) -> Iterator[list[Step]]:
    """Continue prompts together, and yield at each step every text's choice.

    Without padding all have one length; with it they are padded to a width.  A reused prefix is the first half of
    the shortest prompt, and of the others as many columns, which an earlier call has put into the cache.  Behind
    padding on the right, the first token is chosen by the logits of a prompt's last token, and written tokens come
    after the padding.
    """
    width = len(prompts[0]) if padding == named.UNPADDED else width
    # Any token will do behind the mask; one of the text's own has an embedding like all others.
    ids = torch.stack([one[:1].expand(width) for one in prompts]).clone()
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        places = slice(width - len(one), width) if padding == named.LEFT else slice(0, len(one))
        ids[row, places], mask[row, places] = one, 1
    held = None if cache == named.NO_CACHE else caches.make(
        "static" if cache == named.PREALLOCATED else "dynamic", model.config, width + n_new - 1
    )
    cached = {"use_cache": False} if held is None else {"past_key_values": held, "use_cache": True}

    def fed(start: int, end: int, keep: int) -> torch.Tensor:
        places = positions(model, (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, start:])
        return model(ids[:, start:end], attention_mask=mask[:, :end], logits_to_keep=keep, **places, **cached).logits

    begun = 0
    if cache == named.PREFIX:
        shortest = min(map(len, prompts))
        begun = shortest // 2 + (width - shortest if padding == named.LEFT else 0)
        fed(0, begun, 1)
    for step in range(n_new):
        first = step == 0
        logits = fed(begun if first or held is None else ids.shape[1] - 1, ids.shape[1], int(padding != named.RIGHT))
        lasts = [len(one) - 1 - begun if first and padding == named.RIGHT else -1 for one in prompts]
        chosen = [choose(row[last], text, step) for row, last, text in zip(logits, lasts, samples, strict=True)]
        yield chosen
        ids = torch.cat([ids, ids.new_tensor([[one.token] for one in chosen])], 1)
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)


def write_by_lookup(model: PreTrainedModel, prompt: torch.Tensor, n_new: int) -> Iterator[list[Step]]:
    """Continue one prompt by transformers' assisted decoding, greedily, with drafts that are looked up in the text."""
    own = model.generation_config
    asked = GenerationConfig(
        max_new_tokens=n_new, do_sample=False, bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id, prompt_lookup_num_tokens=named.AT_ONCE - 1, return_dict_in_generate=True,
        output_logits=True,
    )
    output = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), generation_config=asked)
    tokens = output.sequences[0, len(prompt) :].tolist()
    return ([Step(token, logits[0])] for token, logits in zip(tokens, output.logits, strict=True))


def to_the_end(model: PreTrainedModel, written: Iterator[list[Step]]) -> list[list[Step]]:
    """Gather each text's steps up to the token that ends it."""
    ends = choosing.ends_of(model)
    texts: list[list[Step]] = []
    for steps in written:
        texts = texts or [[] for _ in steps]
        for text, step in zip(texts, steps, strict=True):
            if not text or text[-1].token not in ends:
                text.append(step)
        if all(text[-1].token in ends for text in texts):
            break
    return texts
