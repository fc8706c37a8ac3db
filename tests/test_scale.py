"""Long runs: memory does not grow with the number of samples, and a million rows are read and drawn in seconds."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from kvbook import paths
from kvbook.runs import records

# The frame of every experiment with a model that takes no time: samples of the corpus, a row a layer, progress.
MEASURED = """
    import sys
    from pathlib import Path
    from kvbook import progress
    from kvbook.models import corpus
    from kvbook.runs import records

    def measure(writer):
        kept = []
        samples = corpus.samples("stdlib", lambda text, **_: {"input_ids": list(text.encode())}, n_samples, 16)
        for sample in progress.track(samples, n_samples, "sample"):
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


def peak_kib(folder, n_samples: int, kind: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), str(n_samples), kind],
        env=os.environ | {"KVBOOK_BUILD": str(folder)}, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_samples(tmp_path):
    few, many = (peak_kib(tmp_path, n_samples, "streams") for n_samples in (100, 10_000))
    assert many < 1.2 * few
    # The control: keeping the rows would show.
    assert peak_kib(tmp_path, 10_000, "accumulates") > 1.2 * few


@pytest.mark.slow
def test_a_run_of_a_million_rows_is_read_summed_up_and_drawn_in_seconds(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(paths, "RUNS", tmp_path)
    about = {"model": "llama", "weights": "stand-in", "dtype": "float32", "source": "a/b.py", "place": "hidden"}
    rows = [about | {"layer": layer, "rms": 1e-7, "max_abs": 1e-6 * layer} for layer in range(100)]

    def measure(writer):
        for unit in range(10):
            writer.append(str(unit), (row | {"sample": 1000 * unit + sample} for sample in range(1000) for row in rows))

    run = records.run("million", {}, measure)
    start = time.process_time()
    medians = run.rows.groupby(["model", "dtype", "layer"])["max_abs"].median()
    fig, ax = plt.subplots()
    ax.plot(run.rows["layer"], run.rows["rms"], ".", markersize=1, rasterized=True)
    ax.plot(medians.index.get_level_values("layer"), medians)
    fig.savefig(tmp_path / "rows.svg")
    plt.close(fig)
    # Of this process's own time, so that a busy machine is not taken for a slow reader.
    seconds = time.process_time() - start
    assert len(run.rows) == 1_000_000
    assert medians.iloc[-1] == pytest.approx(99e-6)
    assert seconds < 20
