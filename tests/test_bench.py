"""`make bench`: ratios come out as they are made, an interrupted bench goes on, and the book's own build is timed."""

import itertools
import time
from types import SimpleNamespace

import mini_book
import pandas as pd
import pytest
import torch
from test_static_cache import TIMES, made_rows

from kvbook import paths
from kvbook.errors import UserError
from kvbook.runs import records
from kvreport.benchmarks import ratios as bench
from kvreport.benchmarks import results as tables
from kvreport.chapters.exact_caches import rows as exact_ways
from kvreport.site import speed


def costs(switch: float) -> pd.DataFrame:
    """Make rows in which the row-invariant arithmetic takes `switch` times as long as the stock one."""
    return pd.DataFrame(
        [
            {"repeat": repeat, "arithmetic": name, "prefill_s": 0.4 * factor, "decode_s": 0.02 * factor}
            for repeat in range(3)
            for name, factor in ((exact_ways.STOCK, 1), (exact_ways.EXACT, switch))
        ]
    )


@pytest.fixture
def made_up(monkeypatch, tmp_path, llama_folder):
    """Replace what takes minutes by rows of known times, and note with which settings it was asked for."""
    asked, load = [], bench.loading.load

    def give(rows):
        return lambda settings: asked.append(settings) or SimpleNamespace(rows=rows)

    monkeypatch.setattr(paths, "RUNS", tmp_path)
    monkeypatch.setattr(bench.static_speed, "EXPERIMENT", SimpleNamespace(run=give(made_rows(TIMES))))
    monkeypatch.setattr(bench.cost, "EXPERIMENT", SimpleNamespace(run=give(costs(1.25))))
    read = pd.DataFrame({"kernel": "sum", "repeat": [0, 1], "n_bytes": 4e9, "seconds": [0.1, 0.08]})
    monkeypatch.setattr(bench, "_bandwidth", lambda settings: read)
    monkeypatch.setattr(bench, "_SCORED", 16)

    def load_small(model, *, weights, **options):
        # To draw weights of the true shape takes seconds each time.
        return load(str(llama_folder) if weights == "random" else model, weights=weights, **options)

    monkeypatch.setattr(bench.loading, "load", load_small)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 320}
    monkeypatch.setattr(bench, "_BEYOND", {name: shape | small for name, shape in bench._BEYOND.items()})
    monkeypatch.setattr(bench.checks, "check", lambda asked: time.sleep(0.5))
    return asked


@pytest.fixture
def settings(llama_folder):
    return bench.BenchSettings.checked(
        model=str(llama_folder), shape="smollm2", n_samples=2, n_repeats=2, n_new_tokens=4, seed=7
    )


def test_each_ratio_is_that_of_the_times_that_were_measured(made_up, settings, monkeypatch):
    # Two pieces of work take turns: ours 1 s, their way 3 s.
    clock = itertools.cycle((1.0, 3.0))
    monkeypatch.setattr(bench.timing, "timed", lambda work, device: (work(), next(clock)))
    rows = bench.run(settings).rows.set_index("what")
    assert len(rows) == 13
    drift = rows.filter(like="drift", axis=0)
    assert len(drift) == 2
    assert (drift[["lowest", "ratio", "highest"]] == 3).all(axis=None)
    # A sample of two.
    assert (drift["seconds"] == 0.5).all()
    assert (drift["against_seconds"] == 1.5).all()
    faster = rows.loc["static cache, one-row step on large pages, compiled, a token, bfloat16"]
    # 200 tokens: a prefill and 199 steps of 8 ms, against 200 at 40 a second.
    assert faster["ratio"] == pytest.approx(200 / 40 / (0.03 / 1.01 + 1.592), rel=0.01)
    for dtype in ("bfloat16", "float32"):
        switch = rows.loc[f"row-invariant decode step, {dtype}"]
        assert switch["ratio"] == pytest.approx(1 / 1.25)
        assert (switch["seconds"], switch["against_seconds"]) == pytest.approx((0.025, 0.02))
    assert {one.cost_dtype for one in made_up if hasattr(one, "cost_dtype")} == {"bfloat16", "float32"}
    assert {"sliding window", "mixture of experts"} == set(bench._BEYOND)
    for name in bench._BEYOND:
        beyond = rows.loc[f"row-invariant decode step, {name}, bfloat16"]
        assert beyond["ratio"] == pytest.approx(beyond["against_seconds"] / beyond["seconds"], rel=0.9)
    check = rows.loc["one full pass of 24 tokens, float32"]
    assert check["against_seconds"] >= 0.5
    assert check["ratio"] == pytest.approx(check["against_seconds"] / check["seconds"], rel=0.5)
    share = rows.loc["its share of the memory bandwidth"]
    # Over 50 GB/s, for the weights of 134.5 million numbers of two bytes and some keys and values, in 8 ms.
    assert share["ratio"] == pytest.approx(2 * 134.5e6 / 50e9 / 0.008, rel=0.05)


class Counted:
    """A way to read whose passes are counted; its logits are another one's, moved a little."""

    def __init__(self, shift: float) -> None:
        self.passes = 0
        self._shift = shift

    def __call__(self, fed: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(fed.shape[1], 50, generator=generator) * 3
        return logits + self._shift * torch.randn(fed.shape[1], 50, generator=generator)


@pytest.mark.parametrize("shift", [0.01, 0.3])
def test_one_pass_of_each_gives_every_statistic_that_a_script_a_statistic_gives(shift):
    ids = torch.randint(50, (1, 65), generator=torch.Generator().manual_seed(5))
    one, other = Counted(0), Counted(shift)
    ours = bench.statistics_in_one_pass(one, other, ids)
    assert (one.passes, other.passes) == (1, 1)
    theirs = bench.statistic_by_statistic(one, other, ids)
    assert (one.passes, other.passes) == (1 + 5, 1 + 5)
    assert ours == pytest.approx(theirs, rel=2e-3)
    # Control: of another way they are others.
    assert bench.statistics_in_one_pass(one, Counted(2 * shift), ids) != pytest.approx(theirs, rel=2e-3)


def test_a_bench_measures_at_its_own_hour_and_not_what_was_measured_before(made_up, settings):
    first = bench.run(settings)
    again = bench.run(settings)
    later = bench.run(settings.model_copy(update={"seed": 8}))
    assert (first.made, again.made, later.made) == (True, False, True)
    assert {asked.seed for asked in made_up} == {7, 8}


def test_an_interrupted_bench_goes_on_behind_its_last_part(made_up, settings, monkeypatch):
    whole, done = bench._decoding, []
    monkeypatch.setitem(bench.PARTS, "decoding", lambda settings: done[3])
    drift = bench._row("a", "b", [1.0], [1.0])
    monkeypatch.setitem(bench.PARTS, "drift", lambda settings: done.append("drift") or [drift])
    with pytest.raises(IndexError):
        bench.run(settings)
    monkeypatch.setitem(bench.PARTS, "decoding", whole)
    assert len(bench.run(settings).rows) == 12
    assert done == ["drift"]


def test_the_table_says_both_times_and_the_range(made_up):
    rows = pd.DataFrame([bench._row("ours", "theirs", [0.002, 0.0015, 0.001], [0.0038, 0.003, 0.0022])])
    assert tables.table(rows).iloc[0].tolist() == ["ours", "theirs", "2.00 [1.90 to 2.20]", 3, "1.5", "3"]
    assert tables.table(rows.assign(against="generate"))["ratio"].tolist() == ["2.00 [1.90, 2.20]"], "an interval"


def test_the_bandwidth_is_read_in_the_bench_and_leaves_no_run(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    monkeypatch.setattr(bench.memory_bandwidth, "_N", 1 << 16)
    read = bench._bandwidth(settings)
    assert (read["seconds"] > 0).all()
    assert list(tmp_path.iterdir()) == []


def test_the_book_is_built_from_nothing_again_and_with_one_chapter_to_execute(tmp_path, monkeypatch, settings):
    root = mini_book.create(tmp_path / "book")
    monkeypatch.setattr(paths, "ROOT", root)
    before = sorted(root.rglob("*"))
    warm, one = bench._book(settings.model_copy(update={"profile": "few"}))
    # There is but one chapter here, so executing it is nearly all that there is to do.
    assert warm["ratio"] > max(1, one["ratio"])
    assert warm["ratio"] == pytest.approx(warm["against_seconds"] / warm["seconds"])
    assert warm["against_seconds"] == one["against_seconds"]
    assert sorted(root.rglob("*")) == before


def test_a_book_that_cannot_be_built_is_one_line(tmp_path, monkeypatch, settings):
    root = mini_book.create(tmp_path / "book")
    monkeypatch.setattr(paths, "ROOT", root)
    with pytest.raises(UserError, match="cannot be built") as caught:
        list(bench._book(settings.model_copy(update={"profile": "nosuch"})))
    assert "\n" not in str(caught.value)


def test_a_bench_can_be_recorded(made_up, settings):
    run = bench.run(settings.model_copy(update={"model": "llama"}))
    assert isinstance(run, records.Run)
    assert run.about["experiment"] == "bench"
    assert {"settings", "source", "models", "machine", "commit"} <= set(run.about)


def test_a_page_shows_the_last_bench_of_each_processor_or_says_that_there_is_none(
    made_up, settings, monkeypatch, tmp_path
):
    monkeypatch.setattr(paths, "RECORDED_RUNS", tmp_path / "recorded")
    assert "No bench has been run" in speed.speed()
    # Seeds of this test's own: a run that another test has made would keep that one's time.
    monkeypatch.setattr(records, "_now", lambda: "2099-01-02T00:00:00+00:00")
    first = bench.run(settings.model_copy(update={"seed": 81}))
    monkeypatch.setattr(records, "_now", lambda: "2099-01-01T00:00:00+00:00")
    earlier = bench.run(settings.model_copy(update={"seed": 82}))
    ((processor, last),) = tables.latest().items()
    assert last.hash == first.hash
    page = speed.speed()
    assert f"run `{first.hash}`" in page
    assert f"run `{earlier.hash}`" not in page
    # The earlier one from another processor, on which one ratio was not measured.
    there = records.Run(
        earlier.about | {"machine": earlier.about["machine"] | {"processor": "another"}}, earlier.folder
    )
    there.__dict__["rows"] = earlier.rows.iloc[1:].assign(ratio=7.0)
    both = tables.beside({"another": there, processor: last})
    assert list(both.columns) == ["what", "against", "another", processor]
    limited = records.Run({"machine": {"processor": "A CPU, ONEDNN_MAX_CPU_ISA=AVX2"}}, earlier.folder)
    assert tables.headings({"a": limited}) == {"a": "A CPU, held to AVX2"}
    assert both["what"].tolist() == last.rows["what"].tolist()
    there.__dict__["rows"] = there.rows.assign(
        what=there.rows["what"].replace("its share of the memory bandwidth", "old")
    )
    assert tables.beside({"another": there, processor: last})["what"].tolist() == [*last.rows["what"], "old"]
    assert both["another"].iloc[0] == ""
    assert both["another"].iloc[1].startswith("7.00 [")
    assert ":name: tab-speed" in page
    # Prefill and decode step, and a decode step of each model beyond the book's.
    assert page.count("row-invariant") == 2 * 2 + len(bench._BEYOND)


def test_the_models_beyond_the_books_have_about_a_hundred_million_parameters_and_what_they_are_named_for():
    for name, shape in bench._BEYOND.items():
        config = bench.AutoConfig.for_model(**shape)
        with torch.device("meta"):
            model = bench.AutoModelForCausalLM.from_config(config)
        assert 0.8e8 < model.num_parameters() < 1.3e8
        if name == "sliding window":
            assert config.sliding_window < 100
        else:
            assert config.num_experts_per_tok < config.num_local_experts
