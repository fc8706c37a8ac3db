"""`make bench`: ratios are those of the measured times, an interrupted bench goes on, and targets are judged by it."""

import itertools
import pkgutil
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import mini_book
import pandas as pd
import pytest
from made_up import MACHINE, run_of
from refusing import refusal
from test_static_cache import timed

from kvbook import paths
from kvbook.runs import records
from kvbook.settings import read_yaml
from kvreport.benchmarks import apart, results, switch, turns
from kvreport.benchmarks import ratios as bench
from kvreport.chapters.exact_caches import rows as exact_ways
from kvreport.chapters.static_cache import rows as static_rows
from kvreport.site import speed


def costs(over_stock: float) -> pd.DataFrame:
    """Make rows in which the row-invariant arithmetic takes `switch` times as long as the stock one."""
    return pd.DataFrame([
        {"repeat": repeat, "arithmetic": name, "prefill_s": 0.4 * factor, "decode_s": 0.02 * factor}
        for repeat in range(3) for name, factor in ((exact_ways.STOCK, 1), (exact_ways.EXACT, over_stock))
    ])


@pytest.fixture
def made_up(monkeypatch, runs, llama_folder):
    """Replace what takes minutes by rows of known times, and note with which settings it was asked for."""
    asked, load = [], bench.loading.load

    def give(rows):
        return lambda settings: asked.append(settings) or SimpleNamespace(rows=rows)

    monkeypatch.setattr(bench.static_speed, "EXPERIMENT", SimpleNamespace(run=give(timed()["static_speed"])))
    monkeypatch.setattr(switch.cost, "EXPERIMENT", SimpleNamespace(run=give(costs(1.25))))
    seconds = {static_rows.ONE_CALL: 0.01, static_rows.OURS: 0.02, "generate": 0.04, static_rows.MEMORY: 0.009}
    calls = [{"repeat": n, "program": name, "step_s": step} for n in range(3) for name, step in seconds.items()]
    monkeypatch.setattr(bench.one_call, "EXPERIMENT", SimpleNamespace(run=give(pd.DataFrame(calls))))
    read = pd.DataFrame({"kernel": "sum", "repeat": [0, 1], "n_bytes": 4e9, "seconds": [0.1, 0.08]})
    monkeypatch.setattr(bench, "_bandwidth", lambda settings: read)
    monkeypatch.setattr(bench, "_SCORED", 16)
    for name, fewer in {"_PREFILLED": 32, "_LENGTHS": (20, 40), "_STEPS": 3}.items():
        monkeypatch.setattr(switch, name, fewer)

    def load_small(model, *, weights, **options):
        # To draw weights of the true shape takes seconds each time.
        return load(str(llama_folder) if weights == "random" else model, weights=weights, **options)

    monkeypatch.setattr(bench.loading, "load", load_small)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 320}
    monkeypatch.setattr(switch, "_BEYOND", {name: shape | small for name, shape in switch._BEYOND.items()})
    monkeypatch.setattr(bench.check, "check", lambda asked: None)
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(bench.apart, "timed", lambda command, **_: ({"passes": 3.0, apart.REST: 1.0}, done))
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=lambda command, **_: done))
    return asked


@pytest.fixture
def settings(llama_folder):
    return bench.BenchSettings.checked(model=str(llama_folder), n_samples=2, n_repeats=2, n_new_tokens=5, seed=7)


def test_each_ratio_is_that_of_the_times_that_were_measured(made_up, settings, monkeypatch):
    # Two pieces of work take turns: ours 1 s, their way 3 s.
    clock = itertools.cycle((1.0, 3.0))
    monkeypatch.setattr(turns.timing, "timed", lambda work, device: (work(), next(clock)))
    rows = bench.BENCH.run(settings).rows.set_index("what")
    assert len(rows) == 47
    drift = rows.filter(like="drift", axis=0)
    assert len(drift) == 2
    assert (drift[["lowest", "ratio", "highest"]] == 3).all(axis=None)
    # A sample of two.
    assert (drift["seconds"] == 0.5).all()
    assert (drift["against_seconds"] == 1.5).all()
    faster = rows.loc["static cache, one-row step on large pages, compiled, a token, bfloat16", "ratio"]
    # 200 tokens: a prefill and 199 steps of 8 ms, against 200 at 40 a second.
    assert faster == pytest.approx(200 / 40 / (0.03 / 1.01 + 1.592), rel=0.01)
    for dtype in ("bfloat16", "float32"):
        step = rows.loc[f"row-invariant decode step, {dtype}"]
        assert step["ratio"] == pytest.approx(1 / 1.25)
        assert (step["seconds"], step["against_seconds"]) == pytest.approx((0.025, 0.02))
    peaks = rows.filter(like="peak of memory", axis=0)
    assert len(peaks) == 2
    assert (peaks["ratio"].between(0.5, 2) & peaks["seconds"].isna()).all()
    assert {one.cost_dtype for one in made_up if hasattr(one, "cost_dtype")} == {"bfloat16", "float32"}
    assert all(rows.loc[f"row-invariant decode step, {name}, bfloat16", "ratio"] > 0 for name in switch._BEYOND)
    assert rows.loc["one full pass of 24 tokens, float32", "ratio"] == 3
    # Over 50 GB/s, for the weights of 134.5 million numbers of two bytes and some keys and values, in 8 ms.
    assert rows.loc["its share of the memory bandwidth", "ratio"] == pytest.approx(2 * 134.5e6 / 50e9 / 0.008, rel=0.05)
    assert rows.loc["step in one call, a token, bfloat16", "ratio"] == pytest.approx(4)
    assert rows.loc["step in one call's share of the memory bandwidth", "ratio"] == pytest.approx(0.9)
    assert rows.loc["kvbook check: passes", ["ratio", "seconds"]].tolist() == pytest.approx([4 / 3, 3])
    # Texts are shorter here; the book is built and its tests are run only where that is asked for.
    asked_for, shorter = ("book", "make test"), {"128": "16", "512": "32", "8,191": "40"}
    aimed_at = [target.what for target in results.TARGETS if not target.what.startswith(asked_for)]
    assert {re.sub("128|512|8,191", lambda of: shorter[of[0]], what) for what in aimed_at} <= set(rows.index)


def load(name: str) -> str:
    return name


def judge() -> float:
    return len(load("c")) / 0


def test_time_is_counted_to_the_innermost_function_and_they_are_left_as_they_were(monkeypatch):
    here, before = sys.modules[__name__], load
    clock = itertools.accumulate((0, 3, 0, 4, 0, 1, 2, 5))
    monkeypatch.setattr(apart.time, "perf_counter", lambda: next(clock))
    with apart.of_calls({"weights": f"{__name__}:load", "judging": f"{__name__}:judge"}) as seconds:
        assert [here.load("a"), here.load("b")] == ["a", "b"]
        with pytest.raises(ZeroDivisionError):
            here.judge()
    # Of the eight seconds of `judge`, two are those of the function that it calls.
    assert seconds == {"weights": 9, "judging": 6}
    assert here.load is before


@pytest.mark.slow
def test_a_command_is_taken_apart_into_its_imports_its_functions_and_a_small_rest(llama_folder, monkeypatch):
    seconds, done = apart.timed(["check", str(llama_folder)], capture_output=True, text=True)
    assert (done.returncode, "verdict   rounding" in done.stdout) == (0, True)
    parts = read_yaml(apart.TABLE)["check"]
    assert list(seconds) == [*parts["imports"], *(part for part in seconds if part in parts["calls"]), apart.REST]
    assert set(parts["calls"]) <= set(seconds)
    assert all(taken > 0 for taken in seconds.values())
    assert seconds[apart.REST] < sum(seconds.values()) / 2
    # Control: a command that fails says so, and its time is told all the same.
    table = {"record": {"imports": {"one": ["json"]}, "calls": {}}}
    monkeypatch.setattr("kvbook.settings.read_yaml", lambda _: table)
    seconds, done = apart.timed(["record", "nosuch"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.startswith("kvbook: ")) == (2, True)
    assert list(seconds) == ["one", apart.REST]


def test_the_functions_that_a_command_is_taken_apart_into_are_there():
    for parts in read_yaml(apart.TABLE).values():
        for name in filter(None, (parts.get("first"), *parts["calls"].values())):
            assert callable(pkgutil.resolve_name(name))
        with pytest.raises(AttributeError):
            pkgutil.resolve_name(f"{name}_of_another_release")


def test_a_bench_measures_at_its_own_hour_and_an_interrupted_one_goes_on_after_its_last_part(
    made_up, settings, monkeypatch
):
    done, row = [], turns.row("a", "b", [1.0], [1.0])
    parts = {"first": lambda settings: done.append("first") or [row], "second": lambda settings: done[3]}
    monkeypatch.setattr(bench, "PARTS", parts)
    with pytest.raises(IndexError):
        bench.BENCH.run(settings)
    monkeypatch.setitem(parts, "second", lambda settings: [row])
    assert len(bench.BENCH.run(settings).rows) == 2
    assert done == ["first"]
    later = settings.model_copy(update={"seed": 8})
    assert [bench.BENCH.run(asked).made for asked in (settings, later)] == [False, True]


def test_the_bandwidth_is_read_in_the_bench_and_leaves_no_run(runs, monkeypatch, settings):
    monkeypatch.setattr(bench.step_times, "_N", 1 << 16)
    assert (bench._bandwidth(settings)["seconds"] > 0).all()
    assert list(runs.glob("*")) == []


def test_the_book_is_built_from_nothing_again_and_with_one_chapter_to_execute(tmp_path, monkeypatch, settings):
    root = mini_book.create(tmp_path / "book")
    (root / "src").mkdir()
    (root / "src" / "shown.py").touch()
    monkeypatch.setattr(paths, "ROOT", root)
    found_executed, statuses = [], iter((0, 0, 0, 2))

    def build(command, cwd, env, **_):
        Path(command[3]).write_text('{"figures numbered": 1}')
        assert (env["KVBOOK_ROOT"], env["PROFILE"]) == (str(cwd), "few")
        # A page shows code.
        assert (cwd / "src" / "shown.py").is_file()
        executed = cwd / "_build" / "executed"
        found_executed.append(executed.is_dir() and len(list(executed.iterdir())))
        executed.mkdir(parents=True, exist_ok=True)
        (executed / f"{mini_book.STEM}.ipynb").write_text('{"metadata": {"kvbook": {"duration_s": 12}}}')
        return SimpleNamespace(returncode=next(statuses))

    monkeypatch.setattr(bench.subprocess, "run", build)
    clock = itertools.accumulate((0, 30, 0, 2, 0, 10, 0, 1))
    monkeypatch.setattr(apart.time, "perf_counter", lambda: next(clock))
    before, asked = sorted(root.rglob("*")), settings.model_copy(update={"book": True, "profile": "few"})
    cold, chapter, warm, numbered, rest, one = bench._book(asked)
    assert found_executed == [False, 1, 0]
    assert (cold["seconds"], chapter["seconds"], warm["ratio"], one["ratio"]) == (30, 12, 15, 3)
    assert numbered["what"] == "book, nothing to do (few): figures numbered"
    assert (numbered["seconds"], rest["seconds"]) == (1, 1)
    assert sorted(root.rglob("*")) == before
    assert "cannot be built" in refusal(lambda: list(bench._book(asked)))
    assert list(bench._book(settings)) == []


def test_all_tests_are_timed_and_the_files_named_that_take_longest(monkeypatch, settings):
    cases = "".join(f'<testcase classname="tests.test_{n}" time="{n}"/>' for n in range(22) for _ in range(2))
    statuses = iter((0, 1))

    def run(command, **_):
        Path(command[-1].partition("=")[2].partition("=")[2]).write_text(f"<testsuites>{cases}</testsuites>")
        return SimpleNamespace(returncode=next(statuses))

    monkeypatch.setattr(bench.subprocess, "run", run)
    asked = settings.model_copy(update={"tests": True})
    whole, *files, rest = bench._tests(asked)
    assert whole["against_seconds"] == 462
    assert (len(files), files[0]["what"], files[0]["seconds"]) == (12, "make test: tests.test_21", 42)
    assert rest["seconds"] == 90
    assert "a test fails" in refusal(lambda: list(bench._tests(asked)))
    assert list(bench._tests(settings)) == []


ROWS = pd.DataFrame([
    turns.row("ours", "theirs", [0.002, 0.0015, 0.001], [0.0038, 0.003, 0.0022]),
    turns.row("old", "generate", [1.0], [7.0]),
])


def made(processor: str, finished: str, rows: pd.DataFrame) -> records.Run:
    machine = MACHINE | {"processor": processor, "device_name": processor}
    settings = {"model": "llama", "weights": "stand-in", "shape": "smollm2"}
    return run_of(rows, hash=finished, finished=finished, machine=machine, settings=settings)


def test_the_last_bench_of_each_processor_is_shown_side_by_side_with_ranges(monkeypatch):
    assert results.table(ROWS).to_numpy().tolist() == [
        ["ours", "theirs", "2.00 [1.90 to 2.20]", 3, "1.5", "3"],
        ["old", "generate", "7.00", 1, "1000", "7000"],
    ]
    runs = {"a": made("a", "2030", ROWS.iloc[:1]), "A CPU, ONEDNN_MAX_CPU_ISA=X": made("b", "2029", ROWS)}
    assert results.beside(runs).to_numpy().tolist() == [
        ["ours", "theirs", "2.00 [1.90 to 2.20]", "2.00 [1.90 to 2.20]"], ["old", "generate", "", "7.00"]
    ]
    monkeypatch.setattr(results, "latest", lambda: runs)
    page = speed.speed()
    assert ":name: tab-speed" in page
    assert "run `2030`" in page
    monkeypatch.setattr(results, "latest", dict)
    assert "No bench has been run" in speed.speed()
    assert speed.targets() == ""


def test_the_latest_of_two_benches_of_one_processor_is_taken(made_up, settings, monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RECORDED_RUNS", tmp_path / "recorded")
    monkeypatch.setattr(bench, "PARTS", {"one": lambda settings: ROWS.to_dict("records")})
    runs = []
    for seed, year in ((81, 2099), (82, 2098)):
        monkeypatch.setattr(records, "now", lambda year=year: f"{year}-01-01T00:00:00+00:00")
        runs.append(bench.BENCH.run(settings.model_copy(update={"seed": seed})))
    (last,) = results.latest().values()
    assert last.hash == runs[0].hash


@pytest.mark.parametrize(("place", "bracket", "said"), [
    (4, (0.96, 0.955, 0.97), "1.04: met"),
    (4, (0.96, 0.9, 1.0), "1.04: met, narrowly"),
    (4, (0.8, 0.7, 0.9), "1.25: not met"),
    (4, (0.8, 0.7, 0.96), "1.25: not met, narrowly"),
    # In times `generate`.
    (0, (3.6, 3.6, 3.6), "3.60: met"),
    (0, (3.4, 3.4, 3.4), "3.40: not met"),
    # In seconds, at most 8.
    (15, (7.96, 7.9, 8.2), "8.0 s: met"),
    (15, (8.1, 7.9, 8.2), "8.1 s: not met"),
])
def test_a_target_is_met_or_not_and_a_ratio_narrowly_where_the_bracket_holds_the_target(place, bracket, said):
    target = results.TARGETS[place]
    row = dict(zip(("ratio", "lowest", "highest"), bracket, strict=True)) | {"what": target.what, "seconds": bracket[0]}
    runs = {"a": made("a", "2030", pd.DataFrame([row])), "none": made("b", "2030", pd.DataFrame([row]).iloc[:0])}
    assert results.against_targets(runs).loc[place, ["a", "none"]].tolist() == [said, ""]


def test_a_command_that_fails_while_it_is_timed_is_an_error(made_up, settings, monkeypatch):
    done = SimpleNamespace(returncode=2, stderr="no such file\n")
    monkeypatch.setattr(bench.apart, "timed", lambda command, **_: ({}, done))
    assert "no such file" in refusal(lambda: list(bench._check(settings)))
