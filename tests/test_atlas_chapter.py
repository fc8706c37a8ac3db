"""The chapter on the atlas: what it counts, draws and tabulates of the recorded run, and its badges."""

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from planted import run_of, with_runs

from kvbook.atlas import badges, table
from kvbook.atlas.names import PATHS, SWITCHED
from kvbook.errors import UserError
from kvreport.chapters.atlas import figures, measures, rows, survey, tables
from kvreport.chapters.atlas.settings import AtlasSettings
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


def test_each_outcome_is_counted_once_and_all_architectures_are():
    counted = tables.outcomes(rows.architectures(ROWS)).set_index(["question", "outcome"])["architectures"]
    assert counted[tables.CACHED].to_dict() == {"rounding": 2, "bug": 1, "does not run": 1}
    assert counted[tables.INVARIANT].to_dict() == {"exact": 2, "refused": 1}


def test_a_path_counts_only_architectures_with_a_cache_and_names_what_was_not_judged():
    found = rows.paths(rows.architectures([*ROWS, made("e", cropped=table.NOT_TRIED)]))
    counted = tables.counted(found, "path", "outcome").set_index(["path", "outcome"])["architectures"]
    assert counted["chunks"].to_dict() == {"bug": 1, "rounding": 3}
    assert counted["cropped"][table.NOT_TRIED] == 1


def test_the_survey_says_where_a_cache_is_wrong_and_what_is_refused_and_why_one_does_not_run():
    found = tables.survey(ROWS).set_index("architecture")
    assert found.loc["b", "remark"] == "chunks from 8"
    assert found.loc["c", "remark"] == "refused: met x"
    assert found.loc["d", "remark"] == "ImportError: timm"
    assert found.loc["b", "drift, fp64"] == 0.5
    assert found.loc["d", "row-invariant"] == "not tried"


def test_a_run_that_gives_another_verdict_is_said_to_differ():
    own = [made("a", **{"chunks": "bug"}), made("b", **{"chunks": "bug"}), made("new")]
    found = rows.against(rows.architectures(own), rows.architectures(ROWS))
    assert tables.compared(found)["outcome"].tolist() == ["differs", "agrees"]


def test_the_recorded_run_covers_what_the_chapter_says_and_accuses_only_what_is_written_up(results, recorded):
    verdicts = {row["architecture"]: table.verdict(row) for row in recorded}
    assert len(verdicts) == results.noted("atlas", "rows") > 150
    ran = sum(verdict != "does not run" for verdict in verdicts.values())
    assert ran >= 175
    assert {name for name, verdict in verdicts.items() if verdict == "bug"} == {
        "moshi", "bamba", "mamba", "falcon_mamba", "jamba", "zamba", "zamba2", "nemotron_h", "git",
        "gpt_neo",
    }


def test_errors_and_undeclared_static_caches_are_in_the_table_the_figure_and_the_front_pages_counts(results, recorded):
    raising = {row["architecture"] for row in recorded if table.verdict(row) == table.RAISES}
    assert raising == {"deepseek_v4", "inkling_text", "inkling2_text", "blt"}
    counted = tables.counted(results["paths"], "path", "outcome").set_index(["path", "outcome"])["architectures"]
    assert counted["static cache", table.BUG] == 9
    assert counted["static cache", table.RAISES] == 3
    remarks = tables.survey(recorded).set_index("architecture")["remark"]
    assert "static cache from 0 (not declared)" in remarks["gpt_neo"]
    assert "static cache raises KeyError" in remarks["deepseek_v4"]
    assert number("WRONG", results) == "10"
    assert number("RAISING", results) == "4"
    assert {"wrong", "KeyError: 'compressed_sparse_attention'"} <= set(tables.bugs(recorded)["outcome"])


def test_a_whole_prompt_is_fed_twice_on_the_page_and_in_the_figure_and_makes_no_cache_wrong(results, recorded):
    twice = [row for row in recorded if row.get("cache as long as the prompt") == table.FED_TWICE]
    assert len(twice) > 160
    assert (results["paths"]["outcome"] == "prompt fed twice").sum() == len(twice)
    assert sum(table.verdict(row) == "rounding" for row in twice) > 150
    assert number("FED_TWICE count", results).startswith(f"{len(twice)} of ")


def test_what_older_rows_do_not_tell_reads_not_recorded_there():
    word = {"architecture": "x", "status": "ran", "cache": "DynamicCache", "causal": True, "chunks": "rounding",
            "chunks, drift": {"float64": 1e-15}, "left padding": "rounding", "left padding, drift": {"float64": 1e-15},
            "left padding, token by token": "not applicable: the full pass itself changes with padding",
            "static cache": "wrong, and not declared", "static cache, drift": {"float64": 0.7},
            "cropped": "KeyError: 'x'", "cache as long as the prompt": "right"}
    rows._of_one_word(word)
    row = table.judged(word)
    assert {path: row[path] for path in PATHS} == {
        "token by token": table.NOT_RECORDED, "chunks": "rounding", "static cache": "bug", "batch": table.NOT_RECORDED,
        "left padding": "rounding", "left padding, token by token": table.NOT_RECORDED, "cropped": table.RAISES,
        "cache as long as the prompt": table.NOT_RECORDED,
    }
    assert not table.is_declared(row, "static cache")


def test_each_processors_rows_say_which_paths_they_have():
    bare = {key: value for key, value in made("a").items() if not key.startswith("cropped")}
    paths = {name: rows.paths(rows.architectures(of)) for name, of in (("one", ROWS), ("other", [bare]))}
    found = tables.by_processor(paths).set_index("path")
    assert found.loc["chunks", "one"] == "2 exact or rounding, 1 bug"
    assert found.loc["cropped", "other"] == table.NOT_RECORDED


def test_of_the_recorded_run_none_is_silently_different_and_most_are_exact(recorded):
    switched = [rows.invariant(row) for row in recorded if rows.invariant(row)]
    assert rows.DIFFERENT not in switched
    assert switched.count(table.EXACT) >= 0.95 * len(switched)


def test_a_share_of_few_architectures_is_not_judged_and_a_silent_difference_always_is(results):
    kept = results["atlas"].head(3).copy()
    kept["row_invariant"] = ["exact", "different: logits", "refused: met x"]
    few = with_runs(results, atlas=run_of(kept, **results.runs["atlas"].about))
    outcomes = {name: check(one, few).outcome for name, one in measures.STATEMENTS.items()}
    assert outcomes.pop("none-differs-silently") == "fails"
    assert outcomes.pop("fp32-products-first") == outcomes.pop("bf16-attention-first") == "not run"
    assert set(outcomes.values()) == {"not run"}


def with_first(results, count, **changed):
    """Give other values to some columns of the first rows of the recorded run."""
    planted = results["atlas"].copy()
    planted.loc[planted.index[:count], list(changed)] = list(changed.values())
    return with_runs(results, atlas=run_of(planted, **results.runs["atlas"].about))


@pytest.mark.parametrize(
    ("sentence", "changed"),
    [
        ("caches-are-sound", {"chunks, drift": '{"float64": [0.5]}'}),
        ("row-invariant-covers-most", {"row_invariant": "refused: met x"}),
        ("chunks-are-worst", {"token by token, drift": '{"float64": [0.5]}'}),
        ("prompt-fed-twice", {"cache as long as the prompt, tokens fed": 1}),
        ("verdicts-agree", {"row_invariant": "refused: met x"}),
        ("fp32-products-first", {"first kind, float32": "attention"}),
        ("bf16-attention-first", {"first kind, bfloat16": "linear"}),
    ],
)
def test_control_a_sentence_fails_on_rows_that_contradict_it(results, sentence, changed):
    statement = measures.STATEMENTS[sentence]
    assert check(statement, results).outcome == "holds"
    assert check(statement, with_first(results, 100, **changed)).outcome == "fails"


def test_a_sentence_names_what_is_refused_and_an_unnamed_one_is_an_error(results):
    assert number("REFUSED_NAMES names", results).count(",") + 2 == int(number("REFUSED", results))
    with pytest.raises(UserError, match="has a name"):
        number("REFUSED names", results)


def test_every_piece_of_a_bar_is_drawn_with_the_length_of_its_count(results):
    for draw, counted in (
        (figures.figure_outcomes, tables.outcomes(results["architectures"])),
        (figures.figure_paths, tables.counted(results["paths"], "path", "outcome")),
    ):
        (ax,) = draw(counted).axes
        assert sum(patch.get_width() for patch in ax.patches) == counted["architectures"].sum()
        assert len(ax.patches) == len(counted)
    operations = tables.counted(results["first operations"], "dtype", "kind")
    (ax,) = figures.figure_operations(operations).axes
    assert sum(patch.get_width() for patch in ax.patches) == operations["architectures"].sum()
    plt.close("all")


def test_a_badge_is_an_svg_that_says_the_verdict_in_words(tmp_path):
    assert badges.write(ROWS, tmp_path) == 4
    for row in ROWS:
        drawn = ElementTree.parse(tmp_path / f"{row['architecture']}.svg").getroot()
        said = "".join(drawn.itertext())
        assert table.verdict(row) in said
        assert "transformers 5.0" in said
        assert drawn.get("height") == "20"
    assert "row-invariant: refused" in (tmp_path / "c.svg").read_text()


def test_a_badge_escapes_what_it_quotes():
    ElementTree.fromstring(badges.svg(made("a<b>&", row_invariant="fails: <x>")))


@pytest.mark.parametrize(
    ("asked", "words"), [({"architectures": ["nosuch"]}, "nosuch"), ({"device": "cuda:99"}, "CUDA devices")]
)
def test_what_cannot_be_run_is_refused_in_one_line(asked, words):
    with pytest.raises(UserError, match=words):
        survey.inputs(AtlasSettings.checked(**asked))


def test_a_unit_is_an_architecture_and_a_row_has_every_column(monkeypatch):
    recorded = {key: value for key, value in made("llama").items() if key not in PATHS}
    monkeypatch.setattr(survey.running, "measured", lambda *_, **__: iter([recorded]))
    appended = {}

    class Writer:
        done = frozenset({"gpt2"})

        def append(self, unit, rows):
            appended[unit] = rows

    survey.measure(AtlasSettings(), {"listed": ["gpt2", "llama"]}, Writer())
    ((row,),) = appended.values()
    assert list(appended) == ["llama"]
    assert tuple(row) == survey.COLUMNS
    assert row["chunks, drift"] == '{"float64": [1e-15], "bfloat16": [0.01]}'


def test_control_a_column_that_the_run_does_not_have_is_an_error(monkeypatch):
    monkeypatch.setattr(survey.running, "measured", lambda names, *_, **__: iter([made("llama", novel=1)]))
    with pytest.raises(AssertionError, match="novel"):
        survey.measure(AtlasSettings(), {"listed": ["llama"]}, type("W", (), {"done": frozenset()}))


def test_a_site_that_has_the_badges_of_the_cited_run_gets_them_no_second_time(monkeypatch, tmp_path):
    app = SimpleNamespace(builder=SimpleNamespace(name="html"), outdir=str(tmp_path))
    written = []
    monkeypatch.setattr(badges, "write", lambda rows, folder: folder.mkdir(exist_ok=True) or written.append(len(rows)))
    site_badges._write(app, None)
    site_badges._write(app, None)
    assert len(written) == 1
    assert written[0] > 150
    # Control: for another run they are made again; a build that failed makes none.
    (tmp_path / site_badges.FOLDER / ".made-of").write_text("another run")
    site_badges._write(app, RuntimeError())
    assert len(written) == 1
    site_badges._write(app, None)
    assert len(written) == 2
