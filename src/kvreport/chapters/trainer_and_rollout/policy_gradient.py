"""A small policy-gradient run: whether a stand-in learns differently from what another arithmetic has sampled.

REINFORCE with the mean reward of the batch as its baseline.  The reward is a toy: the share of sampled tokens with an
even id.  All arms of a repetition have their prompts and their random numbers in common.

Rows, one an update: see ``data/README.md``.
"""


import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvbook.measuring import choosing, predictions, rounded_caches
from kvbook.models import corpus, loading, placement
from kvbook.runs import Experiment, Inputs, Row, Writer
from kvbook.scores import measures
from kvreport.chapters.trainer_and_rollout import TrainerAndRolloutSettings
from kvreport.chapters.trainer_and_rollout import rows as named

# Texts of an update, their tokens, and the step size.
TEXTS, PROMPT, NEW, STEP = 16, 4, 12, 3e-4
# A stand-in: a large trained model would take days.
FAMILY = "llama"


def inputs(settings: TrainerAndRolloutSettings) -> Inputs:
    """Name the stand-in and the corpus."""
    placement.check(settings.device, ("float32", "bfloat16"))
    return {"models": [loading.identify(FAMILY)], "corpus": corpus.describe(settings.corpus)}


def measure(settings: TrainerAndRolloutSettings, _made_of: Inputs, writer: Writer) -> None:
    """Train every arm from the same weights."""
    units = {f"{run}|{arm}": (run, arm) for run in range(settings.n_runs) for arm in named.ARMS}
    for unit, (run, arm) in writer.pending(units, "policy gradient: run"):
        writer.append(unit, train(settings, run, arm))


def train(settings: TrainerAndRolloutSettings, run: int, arm: str) -> list[Row]:
    """Train one arm once; return a row an update."""
    # Models of its own: what is shared must stay as it is.
    loaded = loading.load(FAMILY, device=settings.device)
    trainer = loaded.model.requires_grad_(True)
    low = arm in (named.UNCORRECTED, named.CORRECTED, named.FAULTY)
    rollout = loading.load(FAMILY, dtype="bfloat16", device=settings.device).model if low else trainer
    optimizer = torch.optim.Adam(trainer.parameters(), lr=STEP)
    seed = settings.seed * 1000 + run
    # A folder of fewer texts has each continued several times.
    n_texts = min(TEXTS, corpus.describe(settings.corpus)["files"])
    samples = list(corpus.samples(settings.corpus, loaded.tokenizer, n_texts, PROMPT, seed, full=True))
    prompts = torch.tensor([samples[row % n_texts].ids for row in range(TEXTS)], device=trainer.device)
    rows = []
    for update in range(settings.n_updates):
        if low:
            # The engine takes the new weights, rounded to its dtype.
            rollout.load_state_dict(trainer.state_dict())
        ids, sampled = sample(rollout, prompts, seed, update, arm == named.COARSE)
        new, logits = ids[:, PROMPT:], trainer(ids, use_cache=False).logits[:, PROMPT - 1 : -1]
        scored = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
        if arm == named.FAULTY:
            sampled = sampled.roll(1, 1)
        log_ratio, rewards = scored.detach() - sampled, (new % 2 == 0).float().mean(1)
        weights = torch.ones_like(log_ratio)
        if arm in (named.CORRECTED, named.FAULTY):
            weights = log_ratio.exp().clamp(max=named.CAP)
        loss = -(weights * (rewards - rewards.mean())[:, None] * scored).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append({
            "repetition": run, "arm": arm, "update": update, "reward": rewards.mean().item(),
            "mean_abs": abs(log_ratio.cpu().numpy()).mean(),
            "effective_share": measures.effective_share(weights.log().cpu().numpy().ravel()),
        })
    return rows


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: torch.Tensor, seed: int, update: int, coarse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue prompts with a cache; return the whole texts and the sampled tokens' log-probabilities."""
    cache: Cache = rounded_caches.make(model.config, 4, 4) if coarse else DynamicCache(config=model.config)
    ids, fed, found = prompts, prompts, []
    for step in range(NEW):
        logits = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        texts = range(update * len(prompts), (update + 1) * len(prompts))
        fed = choosing.greedy(predictions.noisy(logits, seed, texts, step))[:, None]
        found.append(logits.log_softmax(-1).gather(-1, fed))
        ids = torch.cat([ids, fed], 1)
    return ids, torch.cat(found, 1)


EXPERIMENT = Experiment(
    "policy_gradient", TrainerAndRolloutSettings, inputs, measure,
    # What was read is among the inputs.
    fields=frozenset({"device", "seed", "n_runs", "n_updates"})
)
