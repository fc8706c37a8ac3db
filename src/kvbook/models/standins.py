"""The stand-ins: one small shape, worn by every family of the documents, and two tokenizers.

All have 12 layers, width 128, 4 heads, the same vocabulary size and context; they differ in what the families differ in
(position scheme, norm, MLP, grouped or multi queries, parallel attention, tied embeddings).  The MLP width is the one
free number: it brings each family to about 2.5 million parameters.  The table beside this module says it family by
family.

The tokenizers are byte-level BPE of one size, which differ in the pre-tokenizer alone:

``gpt2``
    GPT-2's: a word may take the space before it, punctuation never joins a word.
``llama3``
    In the style of Llama-3: any one character that is neither letter, digit nor line break may lead a word, so
    ``.What`` is one piece.  Where a text is cut between the two, its ids change: the seam of the document
    ``forum-reuse``.

``tools/train_stand_ins.py`` trained them, and the models.
"""

from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, processors
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

from kvbook import UserError
from kvbook.settings import read_yaml

Style = Literal["gpt2", "llama3"]

_TABLES = read_yaml(Path(__file__).with_suffix(".tables.yaml"))
_FAMILIES = _TABLES["families"]
FAMILIES = tuple(_FAMILIES)
SPECIAL_TOKENS, VOCABULARY_SIZE = tuple(_TABLES["special_tokens"]), _TABLES["common"]["vocab_size"]
CONTEXT_LENGTH = _TABLES["size"]["max_position_embeddings"]


def tokenizer_style(family: str) -> Style:
    """Name the pre-tokenizer that a family's stand-in uses."""
    return _FAMILIES[family]["style"]


def config(family: str) -> PretrainedConfig:
    """Return the stock transformers configuration of a family's stand-in."""
    if family not in FAMILIES:
        raise UserError(f"no stand-in for {family!r}: choose one of {', '.join(FAMILIES)}")
    return AutoConfig.for_model(**_TABLES["common"] | _FAMILIES[family]["config"])


def tokenizer_of(bpe: Tokenizer, family: str, context_length: int = CONTEXT_LENGTH) -> PreTrainedTokenizerFast:
    """Dress a vocabulary as a family wears it: which special tokens it adds by itself, and its chat form."""
    own, about = Tokenizer.from_str(bpe.to_str()), _FAMILIES[family]
    if "added" in about:
        single, pair = about["added"]
        added = [(token, index) for index, token in enumerate(SPECIAL_TOKENS) if token in single]
        own.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=added)
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, model_max_length=context_length, clean_up_tokenization_spaces=False,
        **special | about.get("special", {}),
    )
    tokenizer.chat_template = about.get("chat")
    return tokenizer
