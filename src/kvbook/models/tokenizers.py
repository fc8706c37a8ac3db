"""The stand-ins' two tokenizers: byte-level BPE of one size, which differ in the pre-tokenizer alone.

``gpt2``
    GPT-2's pre-tokenizer: a word may take the space before it, punctuation never joins a word.
``llama3``
    The Llama-3 style pre-tokenizer: any one character that is neither letter, digit nor line break may lead a word, so
    ``.What`` is one piece.  Where a text is cut between the two, its ids change: the seam of the document
    ``forum-reuse``.

``tools/train_stand_ins.py`` trained them.
"""

from typing import Literal

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

Style = Literal["gpt2", "llama3"]

VOCABULARY_SIZE = 2048

# One list for both tokenizers and all families, so that vocabularies stay comparable; ids 0, 1, 2, ...
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|begin_of_text|>", "<pad>", "<s>", "</s>", "<mask>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|im_start|>", "<|im_end|>",
)

_LLAMA3_CHAT = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CHATS = {"llama": "{{ bos_token }}" + _LLAMA3_CHAT, "qwen2": _CHATML}
# What is put around one text and around two; as Llama's tokenizers do, one begin-of-text in front of every text.
_ADDED = {
    "llama": ("<|begin_of_text|> $A", "<|begin_of_text|> $A <|begin_of_text|> $B"),
    "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
}
_SPECIAL = {
    "llama": {"bos_token": "<|begin_of_text|>"},
    "roberta": {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>",
                "mask_token": "<mask>"},
}


def for_family(bpe: Tokenizer, family: str, context_length: int) -> PreTrainedTokenizerFast:
    """Dress a vocabulary as a family wears it: which special tokens it adds by itself, and its chat form."""
    own = Tokenizer.from_str(bpe.to_str())
    if family in _ADDED:
        single, pair = _ADDED[family]
        added = [(token, index) for index, token in enumerate(SPECIAL_TOKENS) if token in single]
        own.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=added)
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, model_max_length=context_length, clean_up_tokenization_spaces=False,
        **special | _SPECIAL.get(family, {}),
    )
    if family in _CHATS:
        tokenizer.chat_template = _CHATS[family]
    return tokenizer
