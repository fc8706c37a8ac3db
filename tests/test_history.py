"""The atlas through the releases: marks, how long faults lived, and which dated faults were found."""

import gzip

import history as gathering
import pytest

from kvbook.atlas import table
from kvbook.atlas.names import PATHS
from kvreport.site import history


def row(release, architecture="llama", status="ran", **outcomes):
    """Make a recorded row of an architecture that rounds, but for some paths."""
    kinds = dict.fromkeys(PATHS, table.ROUNDING) if status == "ran" else {}
    named = {name.replace("_", " "): kind for name, kind in outcomes.items()}
    about = {"release": release, "architecture": architecture, "status": status, "cache": "DynamicCache"}
    return about | {"row_invariant": ""} | kinds | named


def test_releases_are_ordered_by_number():
    assert sorted(["5.10.4", "4.57.6", "5.9.0"], key=history.order) == ["4.57.6", "5.9.0", "5.10.4"]


@pytest.mark.parametrize(("given", "mark"), [
    (None, ""),
    (row("5.0.0"), "≈"),
    (row("5.0.0", chunks=table.BUG, batch=table.BUG), "✗ cb"),
    # Raising is loud, and no wrong number.
    (row("5.0.0", cropped=table.RAISES), "≈"),
    (row("5.0.0", status="fails"), "–"),
    (row("5.0.0", status=history.NOT_MEASURED), "·"),
    (row("5.0.0", **{"cache as long as the prompt": table.BUG}), "≈"),
])
def test_a_mark_says_what_a_cache_is_and_on_which_paths_it_is_wrong(given, mark):
    assert history.mark(given) == mark


def test_a_fault_that_comes_back_lived_twice_and_releases_that_were_not_measured_end_none():
    rows = [
        row("5.0.0", chunks=table.BUG), row("5.1.0", status=history.NOT_MEASURED), row("5.2.0", chunks=table.BUG),
        row("5.3.0"), row("5.4.0", chunks=table.BUG),
    ]
    lived = [(one["from"], one["to"], one["releases"], one["without"]) for one in history.spans(rows)]
    assert lived == [("5.0.0", "5.2.0", 2, "5.3.0"), ("5.4.0", "5.4.0", 1, None)]


FAULT = {"architecture": "llama", "path": "chunks", "has": "5.0.0", "without": "5.1.0", "threads": [1]}


@pytest.mark.parametrize(("fault", "rows", "said"), [
    (FAULT, [row("5.0.0", chunks=table.BUG), row("5.1.0")], "found"),
    (FAULT, [row("5.0.0", chunks=table.BUG), row("5.1.0", chunks=table.BUG)], "found, and still there in 5.1.0"),
    (FAULT, [row("5.0.0"), row("5.1.0")], "missed: rounding in 5.0.0"),
    (FAULT, [row("5.0.0", chunks=table.BUG)], "not measured yet in 5.1.0"),
    (FAULT, [row("5.0.0", status="fails"), row("5.1.0")], "missed: does not run in 5.0.0"),
    (FAULT | {"path": "beam reordering"}, [], "missed: the atlas has no such path"),
    (FAULT | {"without": None}, [row("5.0.0", chunks=table.BUG)], "found"),
    (FAULT | {"has": None}, [row("5.1.0")], "no false alarm"),
    (FAULT | {"has": None}, [row("5.1.0", chunks=table.BUG)], "false alarm"),
])
def test_a_dated_fault_is_found_missed_or_not_measured_yet(fault, rows, said):
    assert history.recall(fault, rows) == said


def test_twenty_dated_faults_are_listed_ten_of_them_of_states_windows_and_shared_keys_each_with_a_thread():
    faults = [fault for fault in history.dated() if fault["kind"] != "no fault"]
    special = [fault for fault in faults if fault["kind"] in ("recurrent", "hybrid", "window", "shared keys")]
    assert len(faults) >= 20
    assert len(special) >= 10
    assert all(fault["threads"] for fault in faults)


def test_gathered_rows_hold_every_architecture_that_a_release_lists(tmp_path, monkeypatch):
    auto = tmp_path / "transformers-5.0.0" / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    names = 'OrderedDict([("gpt2", "GPT2LMHeadModel"), ("llama", "LlamaForCausalLM")])'
    (auto / "modeling_auto.py").write_text(f"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = {names}\n")
    monkeypatch.setattr(gathering, "RELEASES", tmp_path)
    monkeypatch.setattr(gathering, "RECORDED", tmp_path / "history.csv.gz")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"architecture": "llama", "transformers": "5.0.0", "status": "ran", "cache": "DynamicCache", "causal": true,'
        ' "chunks, drift": {"float64": [1.5, 1.6], "float32": [1.5, 1.6]}}\n'
    )
    monkeypatch.setattr(gathering.sys, "argv", ["history.py", str(rows)])
    gathering.main()
    text = gzip.decompress((tmp_path / "history.csv.gz").read_bytes()).decode()
    assert "5.0.0,,gpt2,,not measured" in text
    assert "1.6" in text
    assert "5.0.0,,llama,DynamicCache,ran" in text
    assert ",bug," in text


def test_a_fault_after_which_nothing_was_measured_is_not_called_unhealed(monkeypatch):
    fault = row("5.0.0", chunks=table.BUG)
    monkeypatch.setattr(history, "recorded", lambda: (fault, row("5.1.0", "gpt2")))
    assert "llama,chunks,5.0.0,5.0.0,1,not measured," in history.markdown()
    # Control: a fault of the newest release.
    monkeypatch.setattr(history, "recorded", lambda: (fault, row("5.1.0", chunks=table.BUG)))
    assert "llama,chunks,5.0.0,5.1.0,2,none yet," in history.markdown()
