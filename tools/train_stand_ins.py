"""Train a stand-in: one corpus, one optimizer, and one budget for every causal family.

    python tools/train_stand_ins.py --family llama

Which batch a step sees is a function of the seed and the step alone.  The result goes to
``data/models/standins/<family>``.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import baselines
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from kvbook import fingerprint, paths
from kvbook.models import corpus, standins
from kvbook.models.standins import SPECIAL_TOKENS, VOCABULARY_SIZE
from kvreport import training

# Of Llama-3's published ``tokenizer.json``.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that a training run is made of, the family aside.

    Attributes
    ----------
    steps : int
        Optimizer steps.
    tokens_per_step : int
        Batch size times sequence length.
    short, long : int
        Sequence length of the first four fifths of the steps, and of the last fifth, which teaches the late positions.
    matrix_lr, other_lr : float
        Peak learning rate of Muon (the layers' matrices, its update scaled to AdamW's size) and of AdamW (embeddings,
        heads, norms, biases).  See changelog/0.1.0.md for one trial of each.
    warmup : int
        Steps of linear warm-up; after three tenths of all steps both rates fall linearly to a tenth.
    weight_decay, clip : float
        Decay of the matrices, and the largest gradient norm.
    mask_share : float
        Share of tokens to be predicted under the masked-LM objective; of them 80 % are masked, 10 % replaced, 10 % kept
        (Devlin et al., 2019).
    seed : int
        Of weights and batches.
    """

    steps: int = 1800
    tokens_per_step: int = 2048
    short: int = 256
    long: int = 1024
    matrix_lr: float = 5e-3
    other_lr: float = 3e-3
    warmup: int = 60
    weight_decay: float = 0.1
    clip: float = 1.0
    mask_share: float = 0.15
    seed: int = 0

    def sequence_length(self, step: int) -> int:
        """Length of the sequences of a step, in tokens."""
        return self.short if step < self.steps * 4 // 5 else self.long

    def rate(self, step: int) -> float:
        """Factor on both learning rates at a step."""
        fall = max(0.0, (step / self.steps - 0.3) / 0.7)
        return min(1.0, (step + 1) / self.warmup) * (1 - 0.9 * fall)


# A masked model learns from the masked positions alone, and from nothing before it looks at their neighbours: it takes
# more of them, and slower embeddings, which would else drown the positions. See `_begin_masked` and changelog/0.1.0.md.
_OWN_RECIPES = {"roberta": Recipe(short=128, matrix_lr=3e-3, other_lr=1e-3, warmup=40, mask_share=0.3)}
# The share of the held-out tokens that a masked model is scored on: RoBERTa's own, whatever it was trained with.
_SCORED_SHARE = 0.15


def recipe_for(family: str) -> Recipe:
    """Choose the recipe of a family's stand-in: the common one, but for the masked model."""
    return _OWN_RECIPES.get(family, Recipe())


def train_bpe(style: standins.Style, texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Train a byte-level BPE vocabulary behind GPT-2's pre-tokenizer, or behind Llama-3's."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style == "gpt2")
    if style == "llama3":
        split = pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def shared_bpe(style: standins.Style):
    """Read one of the two vocabularies, trained once and kept in ``data/models/tokenizers``."""
    path = paths.MODELS / "tokenizers" / f"{style}.json"
    if not path.is_file():
        trained = train_bpe(style, (document.text for document in corpus.documents("stdlib", "train")))
        paths.keep(path, trained.to_str(pretty=True).encode())
    return Tokenizer.from_file(str(path))


def token_stream(tokenizer: PreTrainedTokenizerFast, part: corpus.Part) -> np.ndarray:
    """Encode one part of the standard library as one stream, documents set apart by the tokenizer's own first token."""
    texts = [document.text for document in corpus.documents("stdlib", part)]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([[tokenizer.bos_token_id, *encoding.ids] for encoding in encoded])


def mask_tokens(ids: torch.Tensor, share: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a masked-LM problem of a batch."""
    chosen = torch.rand(ids.shape, generator=generator) < share
    fate = torch.rand(ids.shape, generator=generator)
    random_ids = torch.randint(len(SPECIAL_TOKENS), VOCABULARY_SIZE, ids.shape, generator=generator)
    inputs = torch.where(chosen & (fate < 0.8), SPECIAL_TOKENS.index("<mask>"), ids)
    inputs = torch.where(chosen & (fate >= 0.9), random_ids, inputs)
    return inputs, torch.where(chosen, ids, training.IGNORED)


def batch(stream: np.ndarray, recipe: Recipe, step: int, masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the batch of a step."""
    draws = torch.Generator().manual_seed(training.step_seed(recipe, step))
    length = recipe.sequence_length(step)
    ids = training.cut(stream, recipe.tokens_per_step // length, length, draws)
    return mask_tokens(ids, recipe.mask_share, draws) if masked else (ids, ids)


def held_out_nats(model: PreTrainedModel, stream: np.ndarray, recipe: Recipe, masked: bool) -> float:
    """Mean negative log likelihood of held-out tokens, in windows of the long sequence length.

    For the masked objective the mean runs over the masked positions (a seeded choice), which each see both sides: it is
    a pseudo-likelihood and not comparable to a causal model's.
    """
    draws = torch.Generator().manual_seed(recipe.seed)
    windows = torch.from_numpy(stream).unfold(0, recipe.long, recipe.long)

    def scored() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids in windows.split(4):
            if masked:
                inputs, targets = mask_tokens(ids, _SCORED_SHARE, draws)
                yield model(inputs).logits, targets
            else:
                yield model(ids, use_cache=False).logits[:, :-1], ids[:, 1:]

    return training.mean_nats(model, scored())


# What is two-dimensional but no linear map between layers: Muon is not for these.
_NOT_MATRICES = ("emb", "wte", "wpe", "lm_head")


# Of the masked model's beginning: how large its embeddings are, and its other matrices over their class's own size.
_WORDS, _PLACES, _MATRICES = 0.1, 0.14, 2.0
# How sharply the first two heads of a layer look at the two neighbours.
_SHARPNESS = 1.8


def _begin_masked(model: PreTrainedModel) -> None:
    """Begin a masked model so that it uses word order from the first step on.

    A masked position knows nothing of its own token, so nothing can be learnt from it before some head looks at its
    neighbours; with their class's own initial weights models of this size stay at the frequencies of words for longer
    than this budget (the plateau of Chen et al., 2023).  So positions begin as sinusoids (Vaswani et al., 2017), words
    as large as they, and in every layer the first head looks at the token before and the second at the one after.  All
    of it is then trained like the rest.
    """
    embeddings, encoder = model.roberta.embeddings, model.roberta.encoder
    count, width = embeddings.position_embeddings.weight.shape
    half, head_dim = width // 2, width // model.config.num_attention_heads
    rates = 3 * 1000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(count)[:, None] * rates
    # The fastest sinusoids tell neighbours apart best; a head holds sine and cosine of so many.
    kept = torch.arange(head_dim // 2)
    with torch.no_grad():
        words = embeddings.word_embeddings.weight
        words.mul_(_WORDS / model.config.initializer_range)
        embeddings.position_embeddings.weight.copy_(_PLACES * torch.cat([angles.sin(), angles.cos()], 1))
        for parameter in encoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(_MATRICES)
        for layer in encoder.layer:
            attention = layer.attention.self
            for head, offset in enumerate((-1, 1)):
                sines, cosines = head * head_dim + kept, head * head_dim + head_dim // 2 + kept
                rows = slice(head * head_dim, (head + 1) * head_dim)
                turn_cos, turn_sin = (rates[kept] * offset).cos(), (rates[kept] * offset).sin()
                attention.key.weight[rows] = 0
                attention.key.weight[sines, kept] = _SHARPNESS
                attention.key.weight[cosines, half + kept] = _SHARPNESS
                # The query asks for its own place, turned by the offset.
                attention.query.weight[rows] = 0
                attention.query.weight[sines, kept] = _SHARPNESS * turn_cos
                attention.query.weight[sines, half + kept] = _SHARPNESS * turn_sin
                attention.query.weight[cosines, half + kept] = _SHARPNESS * turn_cos
                attention.query.weight[cosines, kept] = -_SHARPNESS * turn_sin


def _optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, p in model.named_parameters():
        (matrices if p.dim() == 2 and not any(part in name for part in _NOT_MATRICES) else others).append(p)
    muon = torch.optim.Muon(
        matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def train(family: str, recipe: Recipe | None = None, destination: Path | None = None) -> Path:
    """Train the stand-in of a family, or go on with a run that was interrupted."""
    recipe = recipe or recipe_for(family)
    masked = family == "roberta"
    tokenizer = standins.tokenizer_of(shared_bpe(standins.tokenizer_style(family)), family)
    stream = token_stream(tokenizer, "train")
    torch.manual_seed(recipe.seed)
    model = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config(standins.config(family))
    if masked:
        _begin_masked(model)

    def loss_of(step: int) -> torch.Tensor:
        inputs, targets = batch(stream, recipe, step, masked)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs, labels=targets, **({} if masked else {"use_cache": False})).loss

    def rates(step: int) -> list[float]:
        factor = recipe.rate(step)
        return [recipe.matrix_lr * factor, recipe.other_lr * factor]

    # Another recipe is another run: what is under way of one must not be taken up by the other.
    name = f"{family}-{fingerprint.of_values(asdict(recipe))[:8]}"
    log = training.run(name, model, _optimizers(model, recipe), recipe, rates, loss_of)
    held_out = token_stream(tokenizer, "held-out")
    text = b"".join(document.text.encode() for document in corpus.documents("stdlib", "held-out"))
    # Scored in fp32 arithmetic with the bf16 weights that ship.
    shipped = model.to(torch.bfloat16).float()
    nats = {
        "model": held_out_nats(shipped, held_out, recipe, masked),
        "unigram": baselines.unigram_nats(stream, held_out, VOCABULARY_SIZE),
        "bigram_backoff": baselines.bigram_nats(stream, held_out, VOCABULARY_SIZE),
    }
    bits = {who: training.bits_per_byte(mean, len(held_out), len(text)) for who, mean in nats.items()}
    bits["xz_9"] = baselines.xz_bits_per_byte(text)
    about = {
        "family": family, "objective": "masked language model" if masked else "next token", "recipe": asdict(recipe),
        "trained_tokens": recipe.steps * recipe.tokens_per_step, "tokenizer": standins.tokenizer_style(family),
        "train": corpus.describe("stdlib", "train"),
        "held_out": corpus.describe("stdlib", "held-out") | {"tokens": len(held_out)},
        "held_out_bits_per_byte": {who: round(value, 4) for who, value in bits.items()},
    }

    def save(folder: Path) -> None:
        shipped.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return training.publish(destination or paths.STANDINS / family, shipped, log, about, save)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a stand-in; a killed run goes on from its last checkpoint.")
    parser.add_argument("--family", required=True, choices=standins.FAMILIES)
    parser.add_argument("--steps", type=int, help="other than the recipe's number of steps")
    parser.add_argument("--destination", type=Path, help="folder of the finished checkpoint")
    asked = parser.parse_args()
    recipe = recipe_for(asked.family)
    folder = train(asked.family, replace(recipe, steps=asked.steps or recipe.steps), asked.destination)
    print(f"{folder}: {(folder / 'training.json').read_text()}")


if __name__ == "__main__":
    main()
