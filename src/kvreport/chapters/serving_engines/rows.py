"""The rows of the chapter on serving engines by name; to read them takes no torch."""

import itertools

import numpy as np
import pandas as pd

from kvreport.engines.listed import BF16, ENGINES, FP32, QUANTIZED, SPECULATION, UNFUSED

# Engines that are served, by the name that `kvreport.engines` has for them, and dtypes: the experiment of each.
EXPERIMENT_OF = {
    ("vllm", FP32): "served_vllm", ("llama.cpp", FP32): "served_llama_cpp", ("openvino", FP32): "served_openvino",
    ("vllm", BF16): "served_vllm_bf16", ("llama.cpp", BF16): "served_llama_cpp_bf16",
}
# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"served_transformers": 1} | dict.fromkeys(EXPERIMENT_OF.values(), 1)
# How pages write an engine's name; the library is asked in the experiment's own process, not its server.
TITLES = {"transformers": "transformers"} | {name: engine.title for name, engine in ENGINES.items() if engine.scored}

# Tokens of a block of a prefix cache: the fewest that vLLM takes on a processor.
BLOCK = 32
# Requests that are sent at the same time.
TOGETHER = 8
# Tokens that are written when a prompt is asked for again: the bits of a few settle it.
AGAIN_TOKENS = 8

# Ways of asking: with nothing reused, the same once more, after the prompt was asked for, and beside seven others.
COLD, AGAIN, WARM, BATCH = PLAIN = ("cold", "again", "warm", "batch")
WAYS = (AGAIN, WARM, BATCH, SPECULATION, QUANTIZED, UNFUSED)


def tokens(
    served_transformers: pd.DataFrame | None = None, served_vllm: pd.DataFrame | None = None,
    served_llama_cpp: pd.DataFrame | None = None, served_openvino: pd.DataFrame | None = None,
    served_vllm_bf16: pd.DataFrame | None = None, served_llama_cpp_bf16: pd.DataFrame | None = None,
) -> pd.DataFrame | None:
    """Put the rows of all engines together, in the order of these experiments."""
    if not (found := [rows for rows in locals().values() if rows is not None]):
        return None
    rows = pd.concat(found, ignore_index=True)
    # A mode that the engine refuses has one row, with its words.
    rows = rows[rows["refused"].isna()]
    return rows.assign(engine=rows["engine"].map(TITLES), error=(rows["logprob"] - rows["logprob_fp64"]).abs())


def cold(tokens: pd.DataFrame) -> pd.DataFrame:
    """Keep what was written with nothing reused."""
    return tokens[tokens["way"] == COLD]


def _compared(one: pd.DataFrame, other: pd.DataFrame) -> dict[str, float]:
    """Compare two texts after one prompt, up to the first position where another token is chosen."""
    count = min(len(one), len(other))
    ours, theirs = one["token"].to_numpy()[:count], other["token"].to_numpy()[:count]
    common = count if (ours == theirs).all() else int((ours != theirs).argmax())
    moved = np.abs(one["logprob"].to_numpy()[:common] - other["logprob"].to_numpy()[:common])
    return {
        "texts_equal": int(common == count), "bits_equal": int(common == count and not moved.any()),
        "common": common, "mean_abs": moved.mean() if common else np.nan, "max_abs": moved.max(initial=0),
    }


def ways(tokens: pd.DataFrame) -> pd.DataFrame:
    """Compare every way with the cold one: one row a prompt."""
    by, rows = ["engine", "dtype", "texts", "sample", "source"], []
    for key, of in tokens.groupby(by, sort=False):
        ways, about = dict(iter(of.groupby("way", sort=False))), dict(zip(by, key, strict=True))
        rows += [
            about | {"way": way, "cached": ways[way]["cached"].max()} | _compared(ways[COLD], ways[way])
            for way in WAYS if way in ways and COLD in ways
        ]
    return pd.DataFrame(rows)


def engines(cold: pd.DataFrame) -> pd.DataFrame:
    """Compare the cold texts of every two engines in fp32: one row a prompt."""
    by = ["texts", "sample", "source"]
    return pd.DataFrame([
        {"engines": f"{first}, {second}", **_compared(one, other), **dict(zip(by, key, strict=True))}
        for key, of in cold[cold["dtype"] == FP32].groupby(by, sort=False)
        for (first, one), (second, other) in itertools.combinations(of.groupby("engine", sort=False), 2)
    ])
