"""The rows of the page on the models by name; what is computed from shapes takes torch when it is asked for."""

import numpy as np
import pandas as pd

from kvbook import paths
from kvbook.models import registry

# The page's experiment and the revision of its rows.
EXPERIMENTS = {"greedy_samples": 1}

# What weights are stored as: a quantization, and the dtype of the rest.
STORED = {
    "fp32": ("none", "float32"), "16-bit": ("none", "bfloat16"), "8-bit": ("8bit", "bfloat16"),
    "4-bit": ("4bit", "bfloat16"),
}
GIB = 2**30
CAUSAL = "next token"
# What a stand-in is held against, as readers know it.
BASELINES = {"unigram": "unigram", "bigram_backoff": "bigram, backoff", "xz_9": "xz -9"}
# The last steps of a training curve are averaged over this share of its length, the first over fewer.
_WINDOW = 0.1
# As many points of a curve as a figure can show.
_POINTS = 200


def samples(greedy_samples: pd.DataFrame) -> pd.DataFrame:
    """Put together what each model wrote, and the geometric mean of its tokens' probabilities."""
    rows = greedy_samples.sort_values("step").assign(text=lambda of: of["text"].fillna("").astype(str))
    found = rows.groupby(["model", "weights"], sort=False).agg(
        text=("text", "".join), probability=("probability", lambda of: np.exp(np.log(of).mean()))
    )
    return found.reset_index()


def large_models(memory: pd.DataFrame) -> pd.DataFrame:
    """Keep the larger models, in GiB."""
    in_gib = memory.set_index("hub id") / GIB
    return in_gib[in_gib["fp32"] > 20].reset_index()


def _shape(config) -> dict[str, int | str]:
    from kvbook.measuring.memory import kv_heads

    return {
        "layers": config.num_hidden_layers, "width": config.hidden_size, "heads": config.num_attention_heads,
        "KV heads": kv_heads(config), "vocabulary": config.vocab_size,
    }


def architectures() -> pd.DataFrame:
    """List the documents' models: hub id, who used it, shape and parameters."""
    from kvbook.models import sources

    return pd.DataFrame(
        {
            "family": family.title, "hub id": architecture.hub_id, "used by": ", ".join(architecture.documents),
            "positions": family.positions, **_shape(sources.configuration(architecture)),
            "parameters": architecture.parameters,
        }
        for family in registry.families().values() for architecture in family.architectures
    )


def memory() -> pd.DataFrame:
    """Predict the bytes of the documents' models' weights, as `loading.load` does before it loads."""
    import torch

    from kvbook.models import loading, lowbit, sources

    rows = []
    for architecture in (one for family in registry.families().values() for one in family.architectures):
        blank = loading.shape(sources.configuration(architecture))
        needed = {name: lowbit.bytes_needed(blank, bits, getattr(torch, of)) for name, (bits, of) in STORED.items()}
        rows.append({"hub id": architecture.hub_id, **needed})
    return pd.DataFrame(rows)


def stand_ins() -> pd.DataFrame:
    """List the stand-ins: shape, parameters, training, and held-out bits per byte beside the baselines."""
    from kvbook.models import loading, sources

    rows = []
    for name in sources.families_with("stand-in"):
        facts, family = loading.standin_facts(name), registry.families()[name]
        rows.append({
            "family": family.title, **_shape(loading.config_of(name)), "positions": family.positions,
            "tokenizer": facts["tokenizer"], "objective": facts["objective"], "parameters": facts["parameters"],
            **facts["held_out_bits_per_byte"], "held-out files": facts["held_out"]["files"],
            "trained tokens": facts["trained_tokens"],
        })
    return pd.DataFrame(rows)


def _smoothed(losses: np.ndarray) -> np.ndarray:
    """Average a noisy curve over the last steps before each point, fewer where the curve is young and steep."""
    total, ends = np.concatenate([[0.0], np.cumsum(losses)]), np.arange(1, len(losses) + 1)
    starts = np.minimum(np.floor(ends * (1 - _WINDOW)).astype(int), ends - 1)
    return (total[ends] - total[starts]) / (ends - starts)


def curves() -> pd.DataFrame:
    """Read the training losses, in bits per byte so that two tokenizers can stand on one axis.

    The tokens of a byte are counted on the held-out text, whose count the record of a training holds.  Points are
    evenly spaced on a logarithmic axis.
    """
    from kvbook.models import loading, sources
    from kvreport.training import bits_per_byte

    tables = []
    for name in sources.families_with("stand-in"):
        facts, log = loading.standin_facts(name), pd.read_csv(paths.STANDINS / name / "training_log.csv")
        per_nat = bits_per_byte(1.0, facts["held_out"]["tokens"], facts["held_out"]["bytes"])
        table = pd.DataFrame({
            "family": registry.families()[name].title, "name": name, "masked": facts["objective"] != CAUSAL,
            "step": log["step"], "tokens": (log["step"] + 1) * facts["recipe"]["tokens_per_step"],
            "loss_nats": log["loss_nats"], "bits_per_byte": _smoothed(log["loss_nats"].to_numpy()) * per_nat,
        })
        tables.append(table.iloc[np.unique(np.geomspace(1, len(log), _POINTS).round().astype(int)) - 1])
    return pd.concat(tables, ignore_index=True)
