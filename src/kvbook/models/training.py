"""The stand-ins' recipe: one corpus, one optimizer, and one budget for every causal family.

    python -m kvbook models train --family llama

Which batch a step sees is a function of the seed and the step alone, so a run that was killed goes on from its last
checkpoint with the batches that it would have seen.  A checkpoint is two safetensors files and a log, swapped in
atomically; nothing is pickled.  The result goes to ``data/models/standins/<family>``.
"""

import csv
import json
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from kvbook import fingerprint, paths
from kvbook.models import baselines, corpus, standins, tokenizers
from kvbook.models.tokenizers import SPECIAL_TOKENS, VOCABULARY_SIZE

WORK = paths.BUILD / "training"
# Positions without a target.
_IGNORED = -100


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
        heads, norms, biases).  See CHANGELOG.md for one trial of each.
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
        """Give the length of the sequences of a step, in tokens."""
        return self.short if step < self.steps * 4 // 5 else self.long

    def rate(self, step: int) -> float:
        """Give the factor on both learning rates at a step."""
        fall = max(0.0, (step / self.steps - 0.3) / 0.7)
        return min(1.0, (step + 1) / self.warmup) * (1 - 0.9 * fall)


# A masked model learns from the masked positions alone, and from nothing before it looks at their neighbours: it takes more
# of them, and slower embeddings, which would else drown the positions. See `_begin_masked` and CHANGELOG.md.
_OWN_RECIPES = {"roberta": Recipe(short=128, matrix_lr=3e-3, other_lr=1e-3, warmup=40, mask_share=0.3)}
# The share of the held-out tokens that a masked model is scored on: RoBERTa's own, whatever it was trained with.
_SCORED_SHARE = 0.15


def recipe_for(family: str) -> Recipe:
    """Give the recipe that a family's stand-in is made with: the common one, but for the masked model."""
    return _OWN_RECIPES.get(family, Recipe())


def shared_bpe(style: tokenizers.Style):
    """Give one of the two vocabularies, trained once and kept in ``data/models/tokenizers``."""
    path = paths.MODELS / "tokenizers" / f"{style}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        trained = tokenizers.train_bpe(style, (document.text for document in corpus.documents("stdlib", "train")))
        part = path.with_suffix(".partial")
        trained.save(str(part))
        part.replace(path)
    return tokenizers.load_bpe(path)


def token_stream(tokenizer: PreTrainedTokenizerFast, part: corpus.Part) -> tuple[np.ndarray, int]:
    """Encode one part of the standard library as one stream, documents set apart by the tokenizer's own first token."""
    texts = [document.text for document in corpus.documents("stdlib", part)]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    first = [tokenizer.bos_token_id]
    return np.concatenate([first + encoding.ids for encoding in encoded]), sum(len(text.encode()) for text in texts)


def mask_tokens(ids: torch.Tensor, share: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a masked-LM problem of a batch."""
    chosen = torch.rand(ids.shape, generator=generator) < share
    fate = torch.rand(ids.shape, generator=generator)
    random_ids = torch.randint(len(SPECIAL_TOKENS), VOCABULARY_SIZE, ids.shape, generator=generator)
    inputs = torch.where(chosen & (fate < 0.8), SPECIAL_TOKENS.index("<mask>"), ids)
    inputs = torch.where(chosen & (fate >= 0.9), random_ids, inputs)
    return inputs, torch.where(chosen, ids, _IGNORED)


def batch(stream: np.ndarray, recipe: Recipe, step: int, masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the batch of a step: a function of the recipe's seed and the step alone."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    length = recipe.sequence_length(step)
    starts = torch.randint(0, len(stream) - length, (recipe.tokens_per_step // length,), generator=generator)
    ids = torch.from_numpy(np.stack([stream[start : start + length] for start in starts.tolist()]))
    return mask_tokens(ids, recipe.mask_share, generator) if masked else (ids, ids)


def held_out_nats(model: PreTrainedModel, stream: np.ndarray, recipe: Recipe, masked: bool) -> float:
    """Mean negative log likelihood of held-out tokens, in windows of the long sequence length.

    For the masked objective the mean runs over the masked positions (a seeded choice), which each see both sides: it is
    a pseudo-likelihood and not comparable to a causal model's.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    total, count = 0.0, 0
    model.eval()
    rows = len(stream) // recipe.long
    windows = torch.from_numpy(stream[: rows * recipe.long].reshape(rows, recipe.long))
    with torch.inference_mode():
        for ids in windows.split(4):
            inputs, targets = mask_tokens(ids, _SCORED_SHARE, generator) if masked else (ids, ids)
            logits = model(inputs, **({} if masked else {"use_cache": False})).logits.float()
            if not masked:
                logits, targets = logits[:, :-1], targets[:, 1:]
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
            ).item()
            count += int((targets != _IGNORED).sum())
    return total / count


# What is two-dimensional but no linear map between layers: Muon is not for these.
_NOT_MATRICES = ("emb", "wte", "wpe", "lm_head")


# Of the masked model's beginning: how large its embeddings are, and its other matrices over their class's own size.
_WORDS, _PLACES, _MATRICES = 0.1, 0.14, 2.0
# How sharply the first two heads of a layer look at the two neighbours.
_SHARPNESS = 1.8


def _begin_masked(model: PreTrainedModel) -> None:
    """Begin a masked model so that it uses word order from the first step on.

    A masked position knows nothing of its own token, so nothing can be learnt from it before some head looks at its
    neighbours; with their class's own initial weights models of this size stay at the frequencies of words for longer than
    this budget (the plateau of Chen et al., 2023).  So positions begin as sinusoids (Vaswani et al., 2017), words as large
    as they, and in every layer the first head looks at the token before and the second at the one behind.  All of it is
    then trained like the rest.
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
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.dim() == 2 and not any(part in n for part in _NOT_MATRICES)]
    chosen = set(map(id, matrices))
    others = [p for p in named.values() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.matrix_lr,
            momentum=0.95,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _states(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    """List the state of every parameter, in an order that a restart repeats."""
    return [o.state[p] for o in optimizers for group in o.param_groups for p in group["params"]]


def save_checkpoint(folder: Path, step: int, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Write weights and moments after `step` steps as two safetensors files, swap them in whole, drop older ones."""
    fresh = folder / f"step-{step}.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, fresh / "weights.safetensors")
    moments = {
        f"{index}.{key}": value.contiguous()
        for index, state in enumerate(_states(optimizers))
        for key, value in state.items()
    }
    save_file(moments, fresh / "moments.safetensors")
    fresh.replace(folder / f"step-{step}")
    for old in folder.glob("step-*"):
        if old.name != f"step-{step}":
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Read the newest checkpoint into model and optimizers; give the number of steps done, 0 when there is none."""
    steps = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()]
    if not steps:
        return 0
    weights = load_file(folder / f"step-{max(steps)}" / "weights.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    states = _states(optimizers)
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    for name, value in load_file(folder / f"step-{max(steps)}" / "moments.safetensors").items():
        index, _, key = name.partition(".")
        # Moments lie where their parameter does; the count of steps stays on the host, where AdamW keeps it.
        states[int(index)][key] = value if key == "step" else value.to(parameters[int(index)].device)
    return max(steps)


def log_kept(path: Path, step: int) -> list[list[str]]:
    """Read the log's rows before `step`; what a killed run wrote past its checkpoint will be done again."""
    if step == 0 or not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row in list(csv.reader(file))[1:] if int(row[0]) < step]


def train(family: str, recipe: Recipe | None = None, destination: Path | None = None, every: int = 50) -> Path:
    """Train the stand-in of a family, or go on with a run that was interrupted."""
    recipe = recipe or recipe_for(family)
    config = standins.config(family)
    masked = family == "roberta"
    destination = destination or paths.STANDINS / family
    # Another recipe is another run: what is under way of one must not be taken up by the other.
    name = f"{family}-{fingerprint.of_values(asdict(recipe))[:8]}"
    work = WORK / name
    work.mkdir(parents=True, exist_ok=True)

    tokenizer = tokenizers.for_family(shared_bpe(standins.tokenizer_style(family)), family, standins.CONTEXT_LENGTH)
    stream, _ = token_stream(tokenizer, "train")
    torch.manual_seed(recipe.seed)
    model = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config(config)
    if masked:
        _begin_masked(model)
    optimizers = _optimizers(model, recipe)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first = load_checkpoint(work, model, optimizers)
    log = work / "training_log.csv"
    kept = log_kept(log, first)
    started = time.perf_counter() - (float(kept[-1][3]) if kept else 0.0)
    with log.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss_nats", "rate", "elapsed_s"])
        writer.writerows(kept)
        bar = tqdm(range(first, recipe.steps), initial=first, total=recipe.steps, desc=family, mininterval=2)
        for step in bar:
            model.train()
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * recipe.rate(step)
            inputs, targets = batch(stream, recipe, step, masked)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(inputs, labels=targets, **({} if masked else {"use_cache": False})).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            elapsed = time.perf_counter() - started
            writer.writerow([step, f"{loss.item():.5f}", f"{recipe.rate(step):.4f}", f"{elapsed:.1f}"])
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if (step + 1) % every == 0 or step + 1 == recipe.steps:
                file.flush()
                save_checkpoint(work, step + 1, model, optimizers)
    return _publish(family, recipe, model, tokenizer, stream, log, destination)


def _publish(
    family: str,
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train_stream: np.ndarray,
    log: Path,
    destination: Path,
) -> Path:
    """Round to bf16, score what will ship, write the folder whole and swap it in."""
    masked = family == "roberta"
    held_out, n_bytes = token_stream(tokenizer, "held-out")
    text = b"".join(document.text.encode() for document in corpus.documents("stdlib", "held-out"))
    model = model.to(torch.bfloat16)

    def per_byte(nats: float) -> float:
        return round(baselines.bits_per_byte(nats, len(held_out), n_bytes), 4)

    # Scored in fp32 arithmetic with the bf16 weights that ship.
    shipped = model.float()
    scores = {
        "model": per_byte(held_out_nats(shipped, held_out, recipe, masked)),
        "unigram": per_byte(baselines.unigram_nats(train_stream, held_out, VOCABULARY_SIZE)),
        "bigram_backoff": per_byte(baselines.bigram_nats(train_stream, held_out, VOCABULARY_SIZE)),
        "xz_9": round(baselines.xz_bits_per_byte(text), 4),
    }
    part = destination.with_name(destination.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shipped.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.copyfile(log, part / "training_log.csv")
    with log.open(newline="") as file:
        elapsed = float(list(csv.reader(file))[-1][3])
    about = {
        "family": family,
        "parameters": sum(p.numel() for p in model.parameters()),
        "objective": "masked language model" if masked else "next token",
        "recipe": asdict(recipe),
        "trained_tokens": recipe.steps * recipe.tokens_per_step,
        "tokenizer": standins.tokenizer_style(family),
        "train": corpus.describe("stdlib", "train"),
        "held_out": corpus.describe("stdlib", "held-out") | {"tokens": len(held_out)},
        "held_out_bits_per_byte": scores,
        "trained_s": elapsed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
    }
    (part / "training.json").write_text(json.dumps(about, indent=2) + "\n")
    shutil.rmtree(destination, ignore_errors=True)
    part.replace(destination)
    return destination
