"""`kvbook selftest`: every part is tried, a part that fails is one line, and the file tells nobody's name or path."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from test_static_cache import timed

from kvbook import paths
from kvbook.runs import records
from kvbook.settings import Settings
from kvreport.running import selftest
from kvreport.site import running


@pytest.fixture
def small(monkeypatch, runs):
    """Keep runs out of this checkout, one small shape, short texts, and known times where decoding takes minutes."""
    monkeypatch.setattr(selftest, "SHAPES", {"small": ("llama", "untrained")})
    texts = selftest.check.samples_of
    monkeypatch.setattr(selftest.check, "samples_of", lambda *of, **_: texts(*of, n_samples=2, n_tokens=16))
    decoding = SimpleNamespace(name="static_speed", run=lambda asked: SimpleNamespace(rows=timed()["static_speed"]))
    monkeypatch.setattr(selftest.speed, "EXPERIMENT", decoding)


@pytest.mark.slow
def test_every_part_gives_its_numbers_and_a_file_to_attach(small, tmp_path):
    done = selftest.EXPERIMENT.run(Settings(seed=5))
    rows = done.rows.set_index(["part", "what"])["value"]
    assert set(done.rows["status"]) == {"ok"}
    verdicts = rows.loc["tells a bug from rounding, small"]
    assert verdicts["verdict, clean model"] in ("rounding", "exact")
    assert verdicts["verdict, positions from 0 on a cache"] == "bug"
    assert set(rows.loc["loads, small"].astype(float)) == {1.0}
    assert set(rows.loc["row-invariant mode, small"].astype(float)) == {1.0}
    assert len(selftest.lines(done.rows)) == len(selftest.PARTS)
    selftest.write(done, tmp_path / "selftest.json")
    written = json.loads((tmp_path / "selftest.json").read_text())
    assert (written["schema"], written["machine"]["device"]) == (selftest.SCHEMA, "cpu")
    assert len(written["rows"]) == len(done.rows)


def test_a_part_that_fails_is_one_line_without_a_path_and_others_go_on(small, monkeypatch, tmp_path, kvbook_here):
    works = {"works": lambda *_: iter([selftest._row("it", 1.0)])}
    parts = {
        "first": Mock(side_effect=RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA")),
        "second": Mock(side_effect=OSError("cannot open /home/somebody/weights.bin")),
    }
    monkeypatch.setattr(selftest, "PARTS", parts | works)
    done = kvbook_here("selftest", "--to", tmp_path / "s.json")
    assert done.returncode == 1
    assert done.stdout.splitlines()[:3] == [
        "failed    first, small: RuntimeError: CUDA error: an illegal memory access",
        "failed    second, small: OSError (its message names a path or a person)", "ok        works, small: it 1",
    ]
    # Control: without the parts that fail the status is 0.
    monkeypatch.setattr(selftest, "PARTS", works)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "others")
    assert kvbook_here("selftest", "--to", tmp_path / "t.json").returncode == 0


def test_a_file_that_would_tell_a_path_is_not_written(small, monkeypatch, tmp_path, kvbook_here):
    told = selftest._row("read /home/somebody/weights.bin", 1.0)
    monkeypatch.setattr(selftest, "PARTS", {"first": lambda *_: iter([told])})
    done = kvbook_here("selftest", "--to", tmp_path / "selftest.json")
    assert done.returncode == 2
    assert "an absolute path" in done.stderr
    assert list(tmp_path.glob("*.json*")) == []


def test_the_books_own_numbers_stand_with_those_of_the_device(small, monkeypatch):
    monkeypatch.setattr(selftest, "SHAPES", {"full size": ("smollm2", "random")})
    monkeypatch.setattr(selftest, "PARTS", {"decode": selftest.decodes})
    # The book has a recorded run of this.
    assert len(selftest.found.printed("static_cache")["static_speed"]) > 0
    book = selftest.found.of_runs("static_cache", {"static_speed": SimpleNamespace(rows=timed()["static_speed"])})
    monkeypatch.setattr(selftest.found, "printed", lambda _: book)
    rows = selftest.EXPERIMENT.run(Settings(seed=9)).rows
    assert (rows["value"].astype(float) == rows["published"]).all()
    assert "(book " in selftest.lines(rows)[0]


def test_the_page_lists_what_no_recorded_run_on_cuda_has_tried(monkeypatch, runs):
    monkeypatch.setattr(paths, "RECORDED_RUNS", runs)
    assert {"`layer_drift`", "`selftest`"} <= set(running.never_on_cuda().split(", "))
    # Control: with a run on CUDA it is left out, with one on a processor it stays.
    for experiment, device in (("layer_drift", "cuda:0"), ("selftest", "cpu")):
        records.run(experiment, {"machine": {"device": device}}, lambda writer: writer.append("u", [{"value": 1}]))
    left = set(running.never_on_cuda().split(", "))
    assert "`layer_drift`" not in left
    assert "`selftest`" in left
