"""`kvbook bench --growth`: every piece can be measured, exponents fit the times, and work grows in proportion."""

import itertools

import pandas as pd
import pytest
import torch
from torch import nn

from kvbook import progress
from kvbook.measuring import memory
from kvbook.models import corpus
from kvbook.runs import records
from kvreport.benchmarks import apart, budget, growth, results
from kvreport.site import speed

SIZES = (10, 100, 1000)


def rows(exponent: float, n_bytes_each: int = 1000) -> pd.DataFrame:
    """Make two repeats of every piece, whose time grows by an exponent."""
    return pd.DataFrame([{
        "what": piece.what, "counts": piece.counts, "size": size, "repeat": repeat,
        "seconds": 2.0 * size**exponent, "n_bytes_before": 10**8, "n_bytes": 10**8 + n_bytes_each * size,
    } for piece in growth.PIECES for repeat in range(2) for size in SIZES])


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_the_times(power):
    table = results.growth_table(rows(power))
    assert set(table["exponent"]) == set(table["at the end"]) == {f"{power:.2f}"}
    assert table["MB added"].iloc[0] == "0 · 0 · 1"
    assert len(table) == len(growth.PIECES)


def test_a_cost_that_every_size_has_hides_growth_at_small_sizes_alone():
    sizes = [1, 10, 100, 1000]
    times = [5 + 0.1 * size**2 for size in sizes]
    assert results.exponent(sizes, times) > 1.5
    assert results.steepest(sizes, times) == pytest.approx(2, abs=0.05)


def test_larger_work_is_extrapolated_by_the_steepest_exponent_and_never_by_less_than_proportion():
    for power, used in ((0.5, 1.0), (2.0, 2.0)):
        found = results.larger(rows(power)).set_index("work")
        minutes = 2 * 1000**power * (10_000 / 1000) ** used / 60
        assert found.loc["kvbook check, 10,000 texts", "minutes"] == f"{minutes:.2g}"
        assert found.loc["kvbook check, 10,000 texts", "GB"] == "0.11"


@pytest.mark.parametrize("number", range(len(growth.PIECES)))
def test_each_piece_does_its_work_and_is_measured(number, runs):
    size = 10 if growth.PIECES[number].counts in ("tokens a text", "tokens") else 2
    found = growth.measured(number, size)
    assert 0 < found["n_bytes_before"] <= found["n_bytes"]
    assert found["seconds"] > 0


def test_an_interrupted_measurement_goes_on_after_its_last_piece(runs, monkeypatch):
    asked, measured = growth.GrowthSettings.checked(n_repeats=1, largest=100), []

    def done(number, size):
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measured.append((number, size)) or {"seconds": 1.0, "n_bytes_before": 1, "n_bytes": 2}

    monkeypatch.setattr(growth, "_in_a_process", done)
    with pytest.raises(KeyboardInterrupt):
        growth.GROWTH.run(asked)
    monkeypatch.setattr(growth, "_in_a_process", lambda number, size: {"seconds": 1.0})
    found = growth.GROWTH.run(asked).rows
    assert len(found) == sum(size <= 100 for piece in growth.PIECES for size in piece.sizes)
    assert found["n_bytes"].notna().sum() == 2


def test_nothing_grows_faster_than_in_proportion_to_its_rows():
    last = max(results.latest(results.GROWTH).values(), key=lambda run: run.about["finished"])
    of_rows = results.medians(last.rows)
    of_rows = of_rows[of_rows["counts"].isin(["texts", "tokens", "rows", "architectures", "layers"])]
    for what, sizes in of_rows.groupby(["what", "counts"]):
        # Sorting and memory beyond the processor's caches cost a little more a row.
        assert results.exponent(sizes["size"], sizes["seconds"]) < 1.1, what


def test_a_page_says_where_growth_was_not_measured(monkeypatch):
    monkeypatch.setattr(results, "latest", lambda _: {})
    assert "has not been measured" in speed.growth()


def peak(n_samples: int, accumulates: bool = False) -> int:
    """Measure the memory of every experiment's frame with a model that takes none: samples, a row a layer, progress."""
    kept = []

    def tokenizer(text, verbose=True):
        return {"input_ids": list(text.encode())}

    def measure(writer):
        for sample in progress.track(corpus.samples("stdlib", tokenizer, n_samples, 16), n_samples, "sample"):
            about = {"model": "llama", "dtype": "float32", "sample": sample.index, "source": sample.source}
            rows = [about | {"layer": layer, "max_abs": 1e-6 * layer, "rms": 1e-7} for layer in range(35)]
            writer.append(str(sample.index), rows)
            kept.extend(rows if accumulates else ())

    made_of = {"n_samples": n_samples, "accumulates": accumulates}
    run, n_bytes = memory.peak(lambda: records.run("scale", made_of, measure), torch.device("cpu"))
    assert run.about["rows"] == 35 * n_samples
    return n_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_samples_and_control_kept_rows_would_show(runs):
    few = peak(100)
    assert peak(4_000) - few < 20e6 < peak(4_000, accumulates=True) - few


# A step's budget: every millisecond is counted once, to the innermost part that ran.

SlowLinear, SlowAttention, Odd = (type(name, (nn.Sequential,), {}) for name in ("SlowLinear", "SlowAttention", "Odd"))


def test_each_part_has_its_own_time_and_together_they_are_the_step(monkeypatch):
    # Read as the model, its attention and its product begin and end, in each of two steps; then no more.
    clock = itertools.accumulate([0, 3, 4, 8, 0, 0] * 2)
    monkeypatch.setattr(apart.time, "perf_counter", lambda: next(clock))
    model = nn.Sequential(Odd(SlowAttention(SlowLinear())))
    with budget.kept(model) as seconds:
        model(torch.zeros(1))
        model(torch.zeros(1))
    model(torch.zeros(1))
    assert seconds == {"products": 16, "attention besides its products": 8, "the rest": 6}
