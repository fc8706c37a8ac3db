"""Tables behind the page on the models."""

import re

import numpy as np
import pandas as pd
import torch
from transformers import PretrainedConfig

from kvbook import paths
from kvbook.measuring.memory import kv_heads
from kvbook.models import loading, lowbit, registry, sources
from kvreport.training import bits_per_byte

# What weights are stored as, and the bytes that follow: a name, a quantization, the dtype of the rest.
STORED = (
    ("fp32", "none", torch.float32),
    ("16-bit", "none", torch.bfloat16),
    ("8-bit", "8bit", torch.bfloat16),
    ("4-bit", "4bit", torch.bfloat16),
)
_GIB = 2**30
_COUNTS = {"parameters": lambda count: f"{count / 1e6:,.{1 if count < 1e8 else 0}f} M", "vocabulary": "{:,}"}
# How each column is written, by table.
FORMATS = {
    "tab-models-documents": _COUNTS,
    "tab-models-memory": {name: lambda n_bytes: _gib(n_bytes) for name, _, _ in STORED},
    "tab-models-stand-ins": _COUNTS,
    "tab-models-bits": dict.fromkeys(("stand-in", "unigram", "bigram, backoff", "xz -9"), "{:.2f}"),
    "tab-models-samples": {"text": lambda text: as_code(on_one_line(text)), "probability": "{:.2f}"},
}
# The last steps of a training curve are averaged over this share of its length, the first over fewer.
_WINDOW = 0.1


def _shape(config: PretrainedConfig) -> dict[str, int | str]:
    return {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "KV heads": kv_heads(config),
        "vocabulary": config.vocab_size,
    }


def architectures() -> pd.DataFrame:
    """List the documents' models: hub id, who used it, shape and parameters."""
    return pd.DataFrame(
        {
            "family": family.title,
            "hub id": architecture.hub_id,
            "used by": ", ".join(architecture.documents),
            "positions": family.positions,
            **_shape(sources.configuration(architecture)),
            "parameters": architecture.parameters,
        }
        for family in registry.families().values()
        for architecture in family.architectures
    )


def memory() -> pd.DataFrame:
    """Predict the bytes of the documents' models' weights, as `loading.load` does before it loads."""
    rows = []
    for family in registry.families().values():
        for architecture in family.architectures:
            blank = loading.shape(sources.configuration(architecture))
            needed = {name: lowbit.bytes_needed(blank, stored, dtype) for name, stored, dtype in STORED}
            rows.append({"hub id": architecture.hub_id, **needed})
    return pd.DataFrame(rows)


def stand_ins() -> pd.DataFrame:
    """List the stand-ins: shape, parameters, and held-out bits per byte beside the baselines."""
    rows = []
    for name in sources.families_with("stand-in"):
        facts, family = loading.standin_facts(name), registry.families()[name]
        rows.append(
            {
                "family": family.title,
                **_shape(loading.config_of(name)),
                "positions": family.positions,
                "tokenizer": facts["tokenizer"],
                "objective": facts["objective"],
                "parameters": facts["parameters"],
                **facts["held_out_bits_per_byte"],
            }
        )
    return pd.DataFrame(rows)


def smoothed(losses: np.ndarray, window: float = _WINDOW) -> np.ndarray:
    """Average a noisy curve over the last steps before each point, fewer where the curve is young and steep."""
    total = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.minimum(np.floor(ends * (1 - window)).astype(int), ends - 1)
    return (total[ends] - total[starts]) / (ends - starts)


def curves() -> pd.DataFrame:
    """Read the training losses, in bits per byte so that two tokenizers can stand on one axis.

    The tokens of a byte are counted on the held-out text, whose count the record of a training holds.
    """
    tables = []
    for name in sources.families_with("stand-in"):
        facts = loading.standin_facts(name)
        log = pd.read_csv(paths.STANDINS / name / "training_log.csv")
        held_out = facts["held_out"]
        per_nat = bits_per_byte(1.0, held_out["tokens"], held_out["bytes"])
        tables.append(
            pd.DataFrame(
                {
                    "family": registry.families()[name].title,
                    "name": name,
                    "masked": facts["objective"] != "next token",
                    "step": log["step"],
                    "tokens": (log["step"] + 1) * facts["recipe"]["tokens_per_step"],
                    "loss_nats": log["loss_nats"],
                    "bits_per_byte": smoothed(log["loss_nats"].to_numpy()) * per_nat,
                }
            )
        )
    return pd.concat(tables, ignore_index=True)


def thinned(table: pd.DataFrame, points: int = 200) -> pd.DataFrame:
    """Keep of each family's curve as many points as a figure can show, evenly spaced on a logarithmic axis."""
    kept = []
    for _, rows in table.groupby("name", sort=False):
        chosen = np.unique(np.geomspace(1, len(rows), points).round().astype(int)) - 1
        kept.append(rows.iloc[chosen])
    return pd.concat(kept, ignore_index=True)


def samples(rows: pd.DataFrame) -> pd.DataFrame:
    """Put together what each model wrote."""
    found = []
    for (model, weights), of in rows.sort_values("step").groupby(["model", "weights"], sort=False):
        found.append(
            {
                "model": model,
                "weights": weights,
                "text": "".join(str(piece) for piece in of["text"] if not pd.isna(piece)),
                "probability": float(np.exp(np.log(of["probability"]).mean())),
            }
        )
    return pd.DataFrame(found)


def on_one_line(text: str) -> str:
    """Write code as one line for a table's cell: line breaks and tabs as signs, what cannot be printed as a dot."""
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
    # Browsers show blanks that stand together as one, unless they are of the kind that does not break.
    return shown.replace("\n", "⏎").replace("\t", "→").replace("  ", "\u00a0\u00a0")


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / _GIB:.{1 if n_bytes >= _GIB else 2}f}"


def as_code(text: str) -> str:
    """Mark text as code, between more backticks than stand together anywhere in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    # The blanks are Markdown's own, for text that begins or ends with a backtick.
    return f"{'`' * (longest + 1)} {text} {'`' * (longest + 1)}"


def bits_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Cut the stand-ins' scores out of their table, under the names that a reader knows."""
    names = {"model": "stand-in", "bigram_backoff": "bigram, backoff", "xz_9": "xz -9"}
    return scores[["family", "objective", "tokenizer", "model", "unigram", "bigram_backoff", "xz_9"]].rename(
        columns=names
    )


def documents_table(architectures: pd.DataFrame) -> pd.DataFrame:
    """Cut what a hub id itself says out of the table of architectures."""
    return architectures[["hub id", "used by", "parameters", "layers", "width", "heads", "KV heads", "vocabulary"]]


def shape_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Cut the stand-ins' shapes out of their table."""
    return scores.drop(columns=["model", "unigram", "bigram_backoff", "xz_9", "objective"])
