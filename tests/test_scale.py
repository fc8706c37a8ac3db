"""Long runs: memory does not grow with the number of samples, and many rows are read in seconds."""

import os
import subprocess
import sys

import pytest

# The frame of every experiment with a model that takes no time: samples of the corpus, a row a layer, progress.
MEASURED = """
import sys
from pathlib import Path
from kvbook import progress
from kvbook.models import corpus
from kvbook.runs import records

def tokenizer(text, verbose=True):
    return {"input_ids": list(text.encode())}

def measure(writer):
    kept = []
    for sample in progress.track(corpus.samples("stdlib", tokenizer, n_samples, 16), n_samples, "sample"):
        about = {"model": "llama", "dtype": "float32", "sample": sample.index, "source": sample.source}
        rows = [about | {"layer": layer, "max_abs": 1e-6 * layer, "rms": 1e-7} for layer in range(14)]
        writer.append(str(sample.index), rows)
        if accumulates:
            kept += rows

n_samples, accumulates = int(sys.argv[1]), sys.argv[2] == "accumulates"
run = records.run("scale", {"n_samples": n_samples, "accumulates": accumulates}, measure)
assert run.about["rows"] == 14 * n_samples
# Not getrusage: its maximum counts what the process was before it became this program.
status = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_samples_and_control_kept_rows_would_show(tmp_path):
    def peak(n_samples, kind):
        command = [sys.executable, "-c", MEASURED, str(n_samples), kind]
        environment = os.environ | {"KVBOOK_BUILD": str(tmp_path)}
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    few = peak(100, "streams")
    assert peak(10_000, "streams") < 1.2 * few < peak(10_000, "accumulates")
