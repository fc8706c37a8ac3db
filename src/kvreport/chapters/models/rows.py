"""The rows of the page on the models by name; what is computed from shapes takes torch when it is asked for."""

import importlib

import numpy as np
import pandas as pd

# The page's experiment and the revision of its rows.
EXPERIMENTS = {"greedy_samples": 1}

# What weights are stored as: a quantization, and the dtype of the rest.
STORED = {
    "fp32": ("none", "float32"), "16-bit": ("none", "bfloat16"), "8-bit": ("8bit", "bfloat16"),
    "4-bit": ("4bit", "bfloat16"),
}
GIB = 2**30
CAUSAL = "next token"


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


def _of_shapes(table: str) -> pd.DataFrame:
    return getattr(importlib.import_module("kvreport.chapters.models.shapes"), table)()


def architectures() -> pd.DataFrame:
    """List the documents' models."""
    return _of_shapes("architectures")


def memory() -> pd.DataFrame:
    """Predict the bytes of their weights."""
    return _of_shapes("memory")


def stand_ins() -> pd.DataFrame:
    """List the stand-ins."""
    return _of_shapes("stand_ins")


def curves() -> pd.DataFrame:
    """Read how the stand-ins learned."""
    return _of_shapes("curves")
