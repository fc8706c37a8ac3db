"""The chapter on the atlas: what it counts, draws and tabulates of the recorded run, and its badges."""

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
from made_up import with_rows
from refusing import refusal

from kvbook.atlas import PATHS, SWITCHED, badges, table
from kvreport.chapters.atlas import AtlasSettings, measures, rows, survey, tables
from kvreport.publishing import found as found_in
from kvreport.publishing.measures import named, written
from kvreport.publishing.statements import check
from kvreport.site import badges as site_badges

VERSIONS = {"transformers": "5.0", "torch": "2.0"}


def made(name, **found):
    """Make a row of an architecture that ran and is causal."""
    row = {"architecture": name, "status": "ran", "cache": "DynamicCache", "causal": True, "row_invariant": "exact"}
    paths = dict.fromkeys(PATHS, "rounding") | {"batch": "exact"}
    drifts = {f"{path}, drift": {"float64": [1e-15], "bfloat16": [1e-2]} for path in paths}
    first = {f"first {what}, {dtype}": "linear" for what in ("operation", "kind") for dtype in SWITCHED}
    return row | paths | drifts | first | VERSIONS | found


ROWS = [
    made("a"),
    made("b", **{"chunks": "bug", "chunks, first wrong position": 8, "chunks, drift": {"float64": [0.5]}}),
    made("c", row_invariant="refused: met x", **{"first kind, bfloat16": "attention"}),
    {"architecture": "d", "status": "fails", "reason": "ImportError: timm"} | VERSIONS,
]


@pytest.fixture(scope="module")
def results():
    return found_in.printed("atlas")


@pytest.fixture(scope="module")
def recorded(results):
    return list(results["architectures"]["row"])


def number(role, results):
    return written(role, named(measures), results)


def test_made_up_rows_are_counted_by_outcome_and_by_path_and_described_in_words():
    counted = tables.outcomes(rows._counted(ROWS)).set_index(["question", "outcome"])["architectures"]
    assert counted[tables.CACHED].to_dict() == {"rounding": 2, "bug": 1, "does not run": 1}
    assert counted[tables.INVARIANT].to_dict() == {"exact": 2, "refused": 1}
    paths = rows.paths(rows._counted([*ROWS, made("e", cropped=table.NOT_TRIED)]))
    counted = tables.counted(paths, "path", "outcome").set_index(["path", "outcome"])["architectures"]
    assert counted["chunks"].to_dict() == {"bug": 1, "rounding": 3}
    assert counted["cropped"][table.NOT_TRIED] == 1
    survey_of = tables.survey(ROWS).set_index("architecture")
    assert survey_of["remark"].to_dict() == {
        "a": "", "b": "chunks: wrong from token 8", "c": "refused: met x", "d": "ImportError: timm",
    }
    assert survey_of.loc["b", "drift, fp64"] == 0.5
    assert survey_of.loc["d", "row-invariant"] == "not tried"


def test_a_run_that_gives_another_verdict_is_said_to_differ():
    own = [made("a", **{"chunks": "bug"}), made("b", **{"chunks": "bug"}), made("new")]
    found = rows._against(rows._counted(own), rows._counted(ROWS))
    assert tables.compared(found)["outcome"].tolist() == ["differs", "agrees"]


def test_the_recorded_run_accuses_only_what_is_written_up(results, recorded):
    verdicts = {row["architecture"]: table.verdict(row) for row in recorded}
    assert len(verdicts) == results.noted("atlas", "rows")
    assert sum(verdict != "does not run" for verdict in verdicts.values()) >= 175
    named = {verdict: {name for name, of in verdicts.items() if of == verdict} for verdict in set(verdicts.values())}
    wrong = "moshi bamba mamba falcon_mamba jamba zamba zamba2 nemotron_h git gpt_neo"
    assert named["bug"] == set(wrong.split())
    assert named[table.RAISES] == {"deepseek_v4", "inkling_text", "inkling2_text", "blt"}
    assert (number("WRONG", results), number("RAISING", results)) == ("10", "4")
    # A prompt that is fed twice makes no cache wrong.
    twice = [row for row in recorded if row.get("cache as long as the prompt") == table.FED_TWICE]
    assert number("FED_TWICE count", results).startswith(f"{len(twice)} of ")
    assert sum(table.verdict(row) == "rounding" for row in twice) > 150


def test_errors_and_undeclared_static_caches_are_in_the_tables(recorded):
    remarks = tables.survey(recorded).set_index("architecture")["remark"]
    assert "static cache: wrong from token 0 (not declared)" in remarks["gpt_neo"]
    assert "static cache raises KeyError" in remarks["deepseek_v4"]
    assert {"wrong", "KeyError: 'compressed_sparse_attention'"} <= set(tables.bugs(recorded)["outcome"])


def test_what_older_rows_do_not_tell_reads_not_recorded_there():
    word = {"architecture": "x", "status": "ran", "cache": "DynamicCache", "causal": True, "chunks": "rounding",
            "chunks, drift": {"float64": 1e-15}, "left padding": "rounding", "left padding, drift": {"float64": 1e-15},
            "left padding, token by token": "not applicable: the full pass itself changes with padding",
            "static cache": "wrong, and not declared", "static cache, drift": {"float64": 0.7},
            "cropped": "KeyError: 'x'", "cache as long as the prompt": "right"}
    rows._of_one_word(word)
    row = table.judged(word)
    assert {path: row[path] for path in PATHS} == dict.fromkeys(PATHS, table.NOT_RECORDED) | {
        "chunks": "rounding", "static cache": "bug", "left padding": "rounding", "cropped": table.RAISES,
    }
    assert not table.is_declared(row, "static cache")


def test_a_path_that_no_row_has_is_left_out_and_reads_not_recorded_beside_a_processor_that_has_it():
    old = made("a", **{"beam reordering": table.NOT_RECORDED})
    del old["cropped"]
    lacks = ["beam reordering", "cropped"]
    paths = {"old": rows.paths(rows._counted([old]))}
    assert not {*paths["old"]["path"], *tables.by_processor(paths)["path"]} & set(lacks)
    paths["new"] = rows.paths(rows._counted(ROWS))
    found = tables.by_processor(paths).set_index("path")
    assert (found.loc[lacks, "old"] == table.NOT_RECORDED).all()
    assert found.loc["chunks", "new"] == "2 exact or rounding, 1 bug"


def test_a_share_of_few_architectures_is_not_judged_and_a_silent_difference_always_is(results):
    kept = results["atlas"].head(3).assign(row_invariant=["exact", "different: logits", "refused: met x"])
    outcomes = {name: check(one, with_rows(results, atlas=kept)).outcome for name, one in measures.STATEMENTS.items()}
    assert outcomes.pop("none-differs-silently") == "fails"
    assert set(outcomes.values()) == {"not run"}


def test_a_sentence_names_what_is_refused_and_an_unnamed_one_is_an_error(results):
    assert number("REFUSED_NAMES names", results).count(",") + 2 == int(number("REFUSED", results))
    assert "has a name" in refusal(number, "REFUSED names", results)


def test_a_badge_is_an_svg_that_says_the_verdict_in_words_and_escapes_what_it_quotes(tmp_path):
    badges.write(ROWS, tmp_path)
    for row in ROWS:
        said = "".join(ElementTree.parse(tmp_path / f"{row['architecture']}.svg").getroot().itertext())
        assert table.verdict(row) in said
        assert "transformers 5.0" in said
    assert "row-invariant: refused" in (tmp_path / "c.svg").read_text()
    ElementTree.fromstring(badges.svg(made("a<b>&", row_invariant="fails: <x>")))


def test_a_unit_is_an_architecture_and_a_row_has_every_column_and_no_other(monkeypatch):
    recorded, appended = {key: value for key, value in made("llama").items() if key not in PATHS}, {}
    monkeypatch.setattr(survey.running, "measured", lambda *_, **__: iter([recorded]))
    asked = AtlasSettings(), {"listed": ["gpt2", "llama"]}, SimpleNamespace(done={"gpt2"}, append=appended.__setitem__)
    survey.measure(*asked)
    ((row,),) = appended.values()
    assert list(appended) == ["llama"]
    assert tuple(row) == survey.COLUMNS
    assert row["chunks, drift"] == '{"float64": [1e-15], "bfloat16": [0.01]}'
    recorded["novel"] = 1
    with pytest.raises(AssertionError, match="novel"):
        survey.measure(*asked)


def test_a_site_that_has_the_badges_of_the_cited_run_gets_them_no_second_time(monkeypatch, tmp_path):
    app, drawn = SimpleNamespace(builder=SimpleNamespace(name="html"), outdir=str(tmp_path)), []
    monkeypatch.setattr(badges, "write", lambda rows, folder: folder.mkdir(exist_ok=True) or drawn.append(len(rows)))
    for _ in range(2):
        site_badges.write(app, None)
    assert len(drawn) == 1
    assert drawn[0] > 150
    # Control: for another run they are made again; a build that failed makes none.
    (tmp_path / site_badges.FOLDER / ".made-of").write_text("another run")
    site_badges.write(app, RuntimeError())
    assert len(drawn) == 1
    site_badges.write(app, None)
    assert len(drawn) == 2
