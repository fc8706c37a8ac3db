"""`kvbook selftest`: every part is tried, a part that fails is one line, and the file tells nobody's name or path."""

import json
from types import SimpleNamespace

import pytest
import typer
from test_static_cache import TIMES, made_rows
from typer.testing import CliRunner

from kvbook import fingerprint, paths
from kvbook.errors import UserError
from kvreport import commands
from kvreport.running import selftest
from kvreport.site import running


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Keep runs out of this checkout, one small shape, and rows of known times where decoding would take a minute."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(selftest, "SHAPES", {"small": ("llama", "untrained")})
    monkeypatch.setattr(selftest.packages, "is_here", lambda family: False)
    decoding = SimpleNamespace(name="static_speed", run=lambda asked: SimpleNamespace(rows=made_rows(TIMES)))
    monkeypatch.setattr(selftest.speed, "EXPERIMENT", decoding)


def settings(seed: int = 5) -> selftest.SelftestSettings:
    return selftest.SelftestSettings.checked(device="cpu", seed=seed)


@pytest.mark.slow
def test_every_part_gives_its_numbers_and_a_file_to_attach(small, tmp_path):
    done = selftest.run(settings())
    rows = done.rows.set_index(["part", "what"])
    assert set(done.rows["status"]) == {"ok", "left out"}
    assert set(done.rows.loc[done.rows["status"] == "left out", "part"]) == {"drift, trained model"}
    verdicts = rows.loc["tells a bug from rounding, small"]["value"]
    assert verdicts["verdict, clean model"] in ("rounding", "exact")
    assert verdicts["verdict, positions from 0 on a cache"] == "bug"
    assert set(rows.loc["loads, small"]["value"].astype(float)) == {1.0}
    assert set(rows.loc["row-invariant mode, small"]["value"].astype(float)) == {1.0}
    assert len(selftest.lines(done.rows)) == len(selftest.PARTS) + 1
    selftest.write(done, tmp_path / "selftest.json")
    written = json.loads((tmp_path / "selftest.json").read_text())
    assert written["schema"] == selftest.SCHEMA
    assert written["machine"]["device"] == "cpu"
    assert len(written["rows"]) == len(done.rows)


def test_a_part_that_fails_is_one_line_and_the_others_go_on(small, monkeypatch, tmp_path):
    def fails(*_):
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(selftest, "PARTS", {"first": fails, "second": lambda *_: iter([selftest._found("it", 1.0)])})
    answer = CliRunner().invoke(_app(), ["selftest", "--to", str(tmp_path / "s.json")])
    assert answer.exit_code == 1
    assert "failed    first, small: RuntimeError: CUDA error: an illegal memory access" in answer.output
    assert "Traceback" not in answer.output
    assert "DSA" not in answer.output
    assert "ok        second, small: it 1" in answer.output
    # Control: without the part that fails the status is 0.
    monkeypatch.setattr(selftest, "PARTS", {"second": selftest.PARTS["second"]})
    monkeypatch.setattr(paths, "RUNS", tmp_path / "others")
    assert CliRunner().invoke(_app(), ["selftest", "--to", str(tmp_path / "t.json")]).exit_code == 0


def _app():
    found = typer.Typer()
    commands.register(found, typer.Typer())
    return found


def test_a_message_that_names_a_path_is_left_out(small, monkeypatch):
    def fails(*_):
        raise OSError("cannot open /home/somebody/weights.bin")

    monkeypatch.setattr(selftest, "PARTS", {"first": fails})
    [line, _] = selftest.lines(selftest.run(settings(6)).rows)
    assert "OSError" in line
    assert "somebody" not in line


def test_a_file_that_would_tell_a_path_is_not_written(small, monkeypatch, tmp_path):
    monkeypatch.setattr(
        selftest, "PARTS", {"first": lambda *_: iter([selftest._found("read /home/somebody/weights.bin", 1.0)])}
    )
    done = selftest.run(settings(7))
    with pytest.raises(UserError, match="an absolute path"):
        selftest.write(done, tmp_path / "selftest.json")
    assert list(tmp_path.glob("*.json*")) == []


def test_an_interrupted_selftest_goes_on_behind_its_last_part(small, monkeypatch):
    tried = []

    def interrupted(*_):
        tried.append("second")
        if tried.count("second") == 1:
            raise KeyboardInterrupt
        yield selftest._found("it", 2.0)

    def first(*_):
        tried.append("first")
        yield selftest._found("it", 1.0)

    monkeypatch.setattr(selftest, "PARTS", {"first": first, "second": interrupted})
    with pytest.raises(KeyboardInterrupt):
        selftest.run(settings(8))
    assert set(selftest.run(settings(8)).rows["status"]) == {"ok", "left out"}
    assert tried == ["first", "second", "second"]


def test_the_books_own_numbers_stand_beside_those_of_the_device(small, monkeypatch):
    monkeypatch.setattr(selftest, "SHAPES", {"full size": ("smollm2", "random")})
    monkeypatch.setattr(selftest, "PARTS", {"decode": selftest.decodes})
    recorded = SimpleNamespace(rows=made_rows(TIMES))
    monkeypatch.setattr(selftest, "_recorded", lambda chapter, experiment: recorded)
    rows = selftest.run(settings(9)).rows
    rows = rows[rows["part"] == "decode, full size"]
    assert (rows["value"].astype(float) == rows["published"]).all()
    assert "(book " in selftest.lines(rows)[0]


def test_the_page_lists_what_no_recorded_run_on_cuda_has_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RECORDED_RUNS", tmp_path)
    assert {"`layer_drift`", "`selftest`"} <= set(running.never_on_cuda(None).split(", "))
    # Control: with a run on CUDA it is left out, with one on a processor it stays.
    for experiment, device in (("layer_drift", "cuda:0"), ("selftest", "cpu")):
        folder = tmp_path / experiment / "a"
        folder.mkdir(parents=True)
        (folder / "rows.csv").write_text("value\n1\n")
        about = {"machine": {"device": device}, "rows_sha256": fingerprint.of_file(folder / "rows.csv")}
        (folder / "run.json").write_text(json.dumps(about))
    left = set(running.never_on_cuda(None).split(", "))
    assert "`layer_drift`" not in left
    assert "`selftest`" in left


def test_the_book_has_a_recorded_growth_for_every_dtype():
    run = selftest._recorded("layer_drift", selftest.by_layer.EXPERIMENT)
    assert set(selftest._growth(run)) == set(selftest.DTYPES)
    # Control: of an experiment that no chapter cites there is none.
    assert selftest._growth(selftest._recorded("layer_drift", selftest.by_layer.TRAINED)) == {}
