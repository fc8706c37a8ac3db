"""The atlas through the releases: marks, how long faults lived, and which dated faults were found."""

import gzip
import json
from unittest.mock import Mock

import history as gathering
import pandas as pd
import pytest

from kvbook import UserError
from kvbook.atlas import PATHS, table
from kvbook.diagnosis import CheckSettings, check, known
from kvbook.exact import switch
from kvreport.site import history


def row(release, architecture="llama", status="ran", **outcomes):
    """Make a recorded row of an architecture that rounds, but for some paths."""
    kinds = dict.fromkeys(PATHS, table.ROUNDING) if status == "ran" else {}
    named = {name.replace("_", " "): kind for name, kind in outcomes.items()}
    about = {"release": release, "architecture": architecture, "status": status, "cache": "DynamicCache"}
    return about | {"row_invariant": ""} | kinds | named


def cells(*rows):
    return history.cells(pd.DataFrame(rows, columns=gathering.COLUMNS))


@pytest.mark.parametrize(("given", "mark"), [
    (row("5.0.0"), "≈"),
    (row("5.0.0", chunks=table.BUG, batch=table.BUG), "✗"),
    # Raising is loud, and no wrong number.
    (row("5.0.0", cropped=table.RAISES), "≈"),
    (row("5.0.0", status="fails"), "–"),
    (row("5.0.0", **{"cache as long as the prompt": table.BUG}), "≈"),
])
def test_a_cell_has_one_mark_that_says_what_a_cache_is(given, mark):
    assert history.MARKS[history.outcomes(cells(given)).item()] == mark


def test_a_fault_that_comes_back_lived_twice_and_releases_that_were_not_measured_end_none():
    lived = history.spans(cells(
        row("5.0.0", chunks=table.BUG), row("5.1.0", status=history.NOT_MEASURED), row("5.2.0", chunks=table.BUG),
        row("5.3.0"), row("5.4.0", chunks=table.BUG),
    ))
    assert lived.iloc[:, -4:].to_numpy().tolist() == [["5.0.0", "5.2.0", 2, "5.3.0"], ["5.4.0", "5.4.0", 1, ""]]


FAULT = {"architecture": "llama", "path": "chunks", "has": "5.0.0", "without": "5.1.0", "threads": [1]}


@pytest.mark.parametrize(("fault", "rows", "said"), [
    (FAULT, [row("5.0.0", chunks=table.BUG), row("5.1.0")], "found"),
    (FAULT, [row("5.0.0", chunks=table.BUG), row("5.1.0", chunks=table.BUG)], "found, and still there in 5.1.0"),
    (FAULT, [row("5.0.0"), row("5.1.0")], "missed: rounding in 5.0.0"),
    (FAULT, [row("5.0.0", chunks=table.BUG)], "not measured yet in 5.1.0"),
    (FAULT, [row("5.0.0", status="fails"), row("5.1.0")], "missed: does not run in 5.0.0"),
    (FAULT | {"path": "contrastive search"}, [row("5.0.0")], "missed: the atlas has no such path"),
    (FAULT | {"without": None}, [row("5.0.0", chunks=table.BUG)], "found"),
    (FAULT | {"has": None}, [row("5.1.0")], "no false alarm"),
    (FAULT | {"has": None}, [row("5.1.0", chunks=table.BUG)], "false alarm"),
])
def test_a_dated_fault_is_found_missed_or_not_measured_yet(fault, rows, said):
    assert history.recall(fault, cells(*rows)) == said


def test_twenty_dated_faults_are_listed_ten_of_them_of_states_windows_and_shared_keys_each_with_a_thread():
    faults = [fault for fault in history.dated() if fault["kind"] != "no fault"]
    special = [fault for fault in faults if fault["kind"] in ("recurrent", "hybrid", "window", "shared keys")]
    assert len(faults) >= 20
    assert len(special) >= 10
    assert all(fault["threads"] for fault in faults)


@pytest.fixture
def release(tmp_path, monkeypatch):
    """A release of two architectures, one of which has a row; the folders of the tool are this test's."""
    auto = tmp_path / "releases" / "transformers-5.0.0" / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    names = 'OrderedDict([("gpt2", "GPT2LMHeadModel"), ("llama", "LlamaForCausalLM")])'
    (auto / "modeling_auto.py").write_text(f"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = {names}\n")
    monkeypatch.setattr(gathering, "RELEASES", tmp_path / "releases")
    monkeypatch.setattr(gathering.paths, "BUILD", tmp_path)
    monkeypatch.setattr(gathering, "RECORDED", tmp_path / "history.csv.gz")
    monkeypatch.setattr(gathering.known, "FILE", tmp_path / "known.json")
    rows = tmp_path / "history" / "5.0.0.jsonl"
    rows.parent.mkdir()
    rows.write_text(
        '{"architecture": "llama", "transformers": "5.0.0", "status": "ran", "cache": "DynamicCache", "causal": true,'
        ' "chunks, drift": {"float32": [1.5], "float64": [1.6]}}\n'
    )
    monkeypatch.setattr(gathering.releases, "run", lambda *_: 0)
    monkeypatch.setattr(gathering.sys, "argv", ["history.py", "5.0.0"])
    return tmp_path


def written(folder):
    return gzip.decompress((folder / "history.csv.gz").read_bytes()).decode()


def test_a_release_is_recorded_with_all_that_it_lists_in_place_of_its_former_rows_and_leaves_no_environment(release):
    for name in ("4.57.6", "5.0.0"):
        gathering.write(name, [{"release": name, "architecture": "opt", "status": "ran"}])
    gathering.main()
    assert "4.57.6,,opt" in written(release)
    assert "5.0.0,,opt" not in written(release)
    assert "5.0.0,,gpt2,,not measured" in written(release)
    assert "5.0.0,,llama,DynamicCache,ran" in written(release)
    assert ",bug," in written(release)
    assert ",1.6," in written(release), "of the finest dtype"
    assert not list((release / "releases").iterdir())


def test_of_a_release_one_architecture_can_be_measured_anew_and_the_others_stay(release, monkeypatch):
    asked = []
    monkeypatch.setattr(gathering.releases, "run", lambda _, words: asked.extend(words) or 0)
    monkeypatch.setattr(gathering.sys, "argv", ["history.py", "llama", "5.0.0"])
    gathering.write("5.0.0", [row("5.0.0", "gpt2"), row("5.0.0", status="fails")])
    gathering.main()
    assert asked[:2] == ["atlas", "llama"]
    assert "5.0.0,,gpt2,DynamicCache,ran" in written(release)
    assert "5.0.0,,llama,DynamicCache,ran" in written(release)


def test_a_report_says_what_a_release_breaks_and_mends_against_the_one_before(release):
    gathering.write("4.57.6", [row("4.57.6", "gpt2", chunks=table.BUG), row("4.57.6", batch=table.BUG)])
    gathering.main()
    said = (release / "history" / "5.0.0.md").read_text()
    assert "Compared with 4.57.6." in said
    assert "## New: 1\n- llama: chunks\n" in said
    assert "## Gone: 2\n- gpt2: chunks\n- llama: batch\n" in said
    assert "## Still there: 0\n" in said


def test_a_release_that_the_atlas_does_not_end_on_is_said_and_leaves_no_row(release, monkeypatch, capsys):
    monkeypatch.setattr(gathering.releases, "run", lambda *_, **__: 1)
    gathering.main()
    assert "5.0.0: the atlas does not run there" in capsys.readouterr().out
    assert not (release / "history.csv.gz").exists()


def test_of_a_release_that_cannot_be_imported_each_row_says_so(release, monkeypatch, capsys):
    too_old = Mock(side_effect=UserError("cannot be imported here: ImportError: too old"))
    monkeypatch.setattr(gathering.releases, "run", too_old)
    gathering.main()
    assert "5.0.0: cannot be imported here" in capsys.readouterr().out
    for name in ("gpt2", "llama"):
        assert f"5.0.0,,{name},,does not run,cannot be imported here: ImportError: too old" in written(release)
    assert not list((release / "releases").iterdir())


def test_a_story_says_from_when_to_when_on_which_paths_and_where_it_was_discussed(monkeypatch):
    monkeypatch.setattr(history, "dated", lambda: [FAULT])
    rows = [row("5.0.0", chunks=table.BUG, batch=table.BUG), row("5.1.0", batch=table.BUG), row("5.2.0")]
    ((name, story),) = history.stories(cells(*rows)).to_numpy()
    assert name == "llama"
    assert story.startswith("wrong from 5.0.0 to 5.1.0 on batch; sound in 5.2.0. wrong in 5.0.0 on chunks;")
    assert story.endswith("sound in 5.1.0 ([1](https://github.com/huggingface/transformers/issues/1))")


def test_a_fault_after_which_nothing_was_measured_is_not_called_unhealed():
    fault = row("5.0.0", chunks=table.BUG)
    assert history.stories(cells(fault, row("5.1.0", "gpt2")))["story"].item().endswith("not measured later")
    # Control: a fault of the newest release.
    assert history.stories(cells(fault, row("5.1.0", chunks=table.BUG)))["story"].item().endswith("not fixed yet")


def test_lifetimes_count_measured_releases_of_faults_that_end():
    rows = [row("5.0.0", chunks=table.BUG), row("5.1.0", chunks=table.BUG), row("5.2.0")]
    assert "through 2 measured releases in the median, and 2 at most" in history.lifetimes(cells(*rows))
    assert history.lifetimes(cells(*rows[:2])) == "No fault is seen to end yet."


def test_only_releases_that_were_measured_whole_are_counted_and_shown():
    partly = row("5.1.0", "gpt2", history.NOT_MEASURED)
    found = cells(row("5.0.0", chunks=table.BUG), row("5.1.0"), partly, row("5.2.0"))
    assert history.counts(found).iloc[:, :4].to_numpy().tolist() == [["5.0.0", 1, 1, 0], ["5.2.0", 1, 0, 1]]
    assert "architecture,wrong on,5.2.0,5.0.0" in "\n".join(history._measured(found))


def test_row_invariant_is_tried_on_the_releases_that_the_switch_names():
    assert history.TRIED == switch.TRIED


CAUSE = {"cause": "positions begin at 0", "kind": "fault", "architectures": ["llama"], "paths": ["chunks"],
         "threads": [], "by": "run", "read": ""}


def test_wrong_cells_are_counted_by_cause_and_those_without_one_are_named(monkeypatch):
    monkeypatch.setattr(history, "read_yaml", lambda _: [CAUSE])
    rows = [row("5.0.0", chunks=table.BUG), row("5.1.0", chunks=table.BUG, batch=table.BUG)]
    told, left = history.explained(history.wrong(cells(*rows)))
    assert told[1][:6] == ["positions begin at 0", "fault", "run", "llama", 2, "5.0.0 to 5.1.0"]
    assert left == ["llama on batch (5.1.0 to 5.1.0)"]


def test_each_cause_written_down_fits_a_recorded_cell_and_says_how_it_was_found():
    known, found = history.causes(), history.cells(history.read())
    assert set(known["cause"]) == set(found.loc[found["outcome"].isin([table.BUG, history.MISFED]), "cause"].dropna())
    assert set(known["by"]) == {"thread", "source", "run", "report"}
    assert known.query("by == 'thread'")["threads"].map(bool).all()


@pytest.mark.parametrize("other", [{"architectures": ["opt"]}, {"paths": ["batch"]}])
def test_control_a_cause_fits_no_other_architecture_or_path(other, monkeypatch):
    monkeypatch.setattr(history, "read_yaml", lambda _: [CAUSE | other])
    assert history.wrong(cells(row("5.0.0", chunks=table.BUG)))["cause"].isna().all()


def test_a_cell_that_the_atlas_feeds_otherwise_than_meant_is_not_counted_as_wrong():
    ours = history.cells(history.read()).query("kind == 'ours'")
    assert history.MISFED in set(ours["outcome"])
    assert history.wrong(ours).empty


def test_each_dated_fault_that_is_missed_says_why_and_no_other_does():
    found = history.cells(history.read())
    missed = [fault for fault in history.dated() if history.recall(fault, found).startswith("missed")]
    assert [fault for fault in history.dated() if "why" in fault] == missed


# What the check knows of faults from this history.

def test_a_model_that_takes_cache_params_is_judged_and_its_known_fault_alone_has_a_cause_and_a_remedy(mamba_folder):
    found = check.check(CheckSettings.checked(model=str(mamba_folder), n_samples=1))
    assert {path.path: path.verdict for path in found.paths} == {"token by token": "rounding", "in two parts": "bug"}
    assert found.cause.startswith("known of mamba: the selective scan takes no initial state, so a second chunk")
    assert (found.first_suspicious_layer, found.remedy[:27]) == (1, "feed the prompt in one call")
    # Control: another class, or another path too.
    assert known.fault("mamba", {"in two parts"}, "5.23.0")
    assert known.fault("mamba", {"in two parts", "token by token"}, "5.23.0") is None
    assert known.fault("llama", {"in two parts"}, "5.23.0") is None


def test_a_release_before_the_mend_is_told_to_update_and_one_after_it_is_not_excused():
    assert known.fault("mamba2", {"in two parts"}, "5.5.4")[1].endswith("or use transformers 5.13.1 or newer")
    assert known.fault("mamba2", {"in two parts"}, "5.13.1") is None


def test_what_the_check_knows_is_what_the_recorded_history_says():
    assert json.loads(known.FILE.read_text()) == history.known(history.cells(history.read()))
