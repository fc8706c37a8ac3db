"""Check a model that does not fit into memory, with random weights, and add a line to ``data/check/large.csv``.

    python tools/large_checks.py meta-llama/Llama-3.1-8B-Instruct n_samples=1 n_tokens=8

What is left out is as for ``kvbook check --memory 8GB``.  Set ``OMP_NUM_THREADS``; a check leaves cores to other work.
"""

import contextlib
import io
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook import paths
from kvbook.diagnosis import CheckSettings, check
from kvbook.measuring import costs
from kvbook.models import loading
from kvbook.runs import machine
from kvreport.publishing import processors

RECORDED = paths.ROOT / "data" / "check" / "large.csv"
DTYPES = ("float64", "float32", "bfloat16")
# What the check says where it cannot finish a layer before it reads the next one.
_BY_STEPS = "every call reads all weights"


def measured(asked: CheckSettings) -> dict[str, Any]:
    """Check, and write time, the peak of memory beside the predicted one, and the verdict."""
    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        found = check.check(asked)
    minutes = (time.perf_counter() - start) / 60
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config, about = loading.config_of(asked.model, "random"), machine.describe("cpu")
    predicted = costs.streamed_bytes(config, asked.dtypes, asked.n_samples * asked.n_tokens)
    return {
        "model": Path(asked.model).name if Path(asked.model).is_dir() else asked.model,
        "parameters": loading.parameter_count(config), "texts": asked.n_samples, "tokens": asked.n_tokens,
        "minutes": round(minutes, 1), "peak_gb": round(peak / 1e9, 2), "predicted_gb": round(predicted / 1e9, 2),
        "by_layers": _BY_STEPS not in told.getvalue(), "verdict": found.verdict,
        "threads": os.environ["OMP_NUM_THREADS"],
        "processor": processors.label([about]), "torch": about["torch"], "transformers": about["transformers"],
    }


def add(found: dict[str, Any]) -> None:
    """Add a line, and the header before the first."""
    pd.DataFrame([found]).to_csv(RECORDED, mode="a", header=not RECORDED.is_file(), index=False, lineterminator="\n")


if __name__ == "__main__":
    given = {"memory": "8GB"} | dict(one.split("=", 1) for one in sys.argv[2:])
    add(measured(CheckSettings.checked(model=sys.argv[1], weights="random", dtypes=DTYPES, **given)))
