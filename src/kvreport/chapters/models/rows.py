"""The rows of the page on the models by name; what is computed from shapes takes torch when it is asked for."""

import importlib

import numpy as np
import pandas as pd

from kvbook.runs.records import Run
from kvreport.publishing.found import Frame

# The page's experiment and the revision of its rows.
EXPERIMENTS = {"greedy_samples": 1}

# What weights are stored as: a quantization, and the dtype of the rest.
STORED = {
    "fp32": ("none", "float32"), "16-bit": ("none", "bfloat16"), "8-bit": ("8bit", "bfloat16"),
    "4-bit": ("4bit", "bfloat16"),
}
GIB = 2**30
CAUSAL = "next token"


def _samples(run: Run) -> pd.DataFrame:
    """Put together what each model wrote, and the geometric mean of its tokens' probabilities."""
    rows = run.rows.sort_values("step").assign(text=lambda of: of["text"].fillna("").astype(str))
    found = rows.groupby(["model", "weights"], sort=False).agg(
        text=("text", "".join), probability=("probability", lambda of: np.exp(np.log(of).mean()))
    )
    return found.reset_index()


def _large(memory: pd.DataFrame) -> pd.DataFrame:
    """Keep the larger models, in GiB."""
    in_gib = memory.set_index("hub id") / GIB
    return in_gib[in_gib["fp32"] > 20].reset_index()


def _shapes(table: str) -> Frame:
    return Frame(lambda: getattr(importlib.import_module("kvreport.chapters.models.shapes"), table)())


ROWS = {
    "architectures": _shapes("architectures"),
    "memory": _shapes("memory"),
    "large models": Frame(_large, ("memory",)),
    "stand-ins": _shapes("stand_ins"),
    "curves": _shapes("curves"),
    "samples": Frame(_samples, ("greedy_samples",)),
}
