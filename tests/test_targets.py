"""The table of targets: what a bench meets, what it misses, and what it did not measure."""

from types import SimpleNamespace

import pandas as pd
import pytest

from kvreport.benchmarks import ratios
from kvreport.benchmarks import results as targets
from kvreport.site import speed


def measured(target, ratio, lowest, highest):
    return pd.DataFrame({"what": [target.what], "ratio": [ratio], "lowest": [lowest], "highest": [highest]})


@pytest.mark.parametrize(
    ("bracket", "said"),
    [
        ((0.95, 0.92, 0.97), "1.05: met"),
        ((0.95, 0.9, 1.0), "1.05: met, narrowly"),
        ((0.8, 0.7, 0.9), "1.25: not met"),
        ((0.8, 0.7, 0.95), "1.25: not met, narrowly"),
    ],
)
def test_a_step_of_at_most_a_tenth_more_meets_its_target_and_narrowly_where_the_bracket_holds_it(bracket, said):
    (target,) = (one for one in targets.TARGETS if one.what == "row-invariant decode step, bfloat16")
    assert targets._met(target, measured(target, *bracket)) == said


@pytest.mark.parametrize(("ratio", "said"), [(2.6, "2.60: met"), (2.4, "2.40: not met")])
def test_decoding_is_measured_in_times_generate(ratio, said):
    assert targets._met(targets.TARGETS[0], measured(targets.TARGETS[0], ratio, ratio, ratio)) == said


def test_each_processor_has_a_column_and_what_its_bench_lacks_is_empty(monkeypatch):
    one = dict.fromkeys(("ratio", "lowest", "highest"), 1.0)
    rows = pd.DataFrame({"what": [target.what for target in targets.TARGETS]}).assign(**one)
    runs = {
        name: SimpleNamespace(rows=some, about={"machine": {"processor": name}})
        for name, some in (("one", rows), ("another", rows.iloc[1:]))
    }
    monkeypatch.setattr(targets, "latest", lambda: runs)
    first, second = speed.targets().splitlines()[-len(targets.TARGETS) - 1 :][:2]
    assert first.endswith("1.00: not met,")
    assert second.endswith("1.00: met,1.00: met")


def test_without_a_bench_there_is_no_table(monkeypatch):
    monkeypatch.setattr(targets, "latest", dict)
    assert speed.targets() == ""


def test_every_target_names_a_line_of_the_last_bench():
    newest = max(targets.latest().values(), key=lambda run: run.about["finished"])
    assert newest.about["experiment"] == targets.EXPERIMENT == ratios.EXPERIMENT
    assert {one.what for one in targets.TARGETS} <= set(newest.rows["what"])
