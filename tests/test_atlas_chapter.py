"""The chapter on the atlas: what it counts, draws and tabulates of the recorded run, and its badges."""

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest

from kvbook.atlas import badges, columns, table
from kvbook.errors import UserError
from kvreport.chapters.atlas import figures, statements, survey, tables
from kvreport.chapters.atlas.results import Results
from kvreport.chapters.atlas.settings import AtlasSettings
from kvreport.publishing.statements import check
from kvreport.site import badges as site_badges

VERSIONS = {"transformers": "5.0", "torch": "2.0"}


def made(name, **found):
    """Make a row of an architecture that ran and is causal."""
    row = {"architecture": name, "status": "ran", "cache": "DynamicCache", "causal": True, "row_invariant": "exact"}
    paths = dict.fromkeys(tables.PATHS, "rounding") | {"batch": "exact"}
    drifts = {f"{path}, drift": {"float64": [1e-15], "bfloat16": [1e-2]} for path in paths}
    first = {f"first {what}, {dtype}": "linear" for what in ("operation", "kind") for dtype in columns.SWITCHED}
    return row | paths | drifts | first | VERSIONS | found


ROWS = [
    made("a"),
    made("b", **{"chunks": "bug", "chunks, first wrong position": 8, "chunks, drift": {"float64": [0.5]}}),
    made("c", row_invariant="refused: met x", **{"first kind, bfloat16": "attention"}),
    {"architecture": "d", "status": "fails", "reason": "ImportError: timm"} | VERSIONS,
]


@pytest.fixture(scope="module")
def results():
    return Results.of_book()


def test_each_outcome_is_counted_once_and_all_architectures_are():
    counted = tables.outcomes(ROWS).set_index(["question", "outcome"])["architectures"]
    assert counted[tables.CACHED].to_dict() == {"rounding": 2, "bug": 1, "does not run": 1}
    assert counted[tables.INVARIANT].to_dict() == {"exact": 2, "refused": 1}


def test_a_path_counts_only_architectures_with_a_cache_and_names_what_was_not_judged():
    counted = tables.by_path([*ROWS, made("e", cropped=table.NOT_TRIED)])
    counted = counted.set_index(["path", "outcome"])["architectures"]
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
    assert tables.compared(own, ROWS)["outcome"].tolist() == ["differs", "agrees"]


def test_the_recorded_run_covers_what_the_chapter_says_and_accuses_only_what_is_written_up(results):
    verdicts = {row["architecture"]: table.verdict(row) for row in results.rows}
    assert len(verdicts) == results.run.about["rows"] > 150
    ran = sum(verdict != "does not run" for verdict in verdicts.values())
    assert ran >= 175
    assert {name for name, verdict in verdicts.items() if verdict == "bug"} == {
        "moshi", "bamba", "mamba", "falcon_mamba", "jamba", "zamba", "zamba2", "nemotron_h", "git",
        "gpt_neo",
    }  # fmt: skip


def test_errors_and_undeclared_static_caches_are_in_the_table_the_figure_and_the_front_pages_counts(results):
    raising = {row["architecture"] for row in results.rows if table.verdict(row) == table.RAISES}
    assert raising == {"deepseek_v4", "inkling_text", "inkling2_text", "blt"}
    counted = results.paths.set_index(["path", "outcome"])["architectures"]
    assert counted["static cache", table.BUG] == 9
    assert counted["static cache", table.RAISES] == 3
    remarks = results.survey.set_index("architecture")["remark"]
    assert "static cache from 0 (not declared)" in remarks["gpt_neo"]
    assert "static cache raises KeyError" in remarks["deepseek_v4"]
    assert statements.NUMBERS["atlas_bug"](results) == "10"
    assert statements.NUMBERS["atlas_raises"](results) == "4"
    assert {"wrong", "KeyError: 'compressed_sparse_attention'"} <= set(tables.bugs(results.rows)["outcome"])


def test_a_whole_prompt_is_fed_twice_on_the_page_and_in_the_figure_and_makes_no_cache_wrong(results):
    twice = [row for row in results.rows if row.get("cache as long as the prompt") == table.FED_TWICE]
    assert len(twice) > 160
    assert results.paths.query("outcome == 'prompt fed twice'")["architectures"].sum() == len(twice)
    assert sum(table.verdict(row) == "rounding" for row in twice) > 150
    assert statements.NUMBERS["atlas_fed_twice"](results).startswith(f"{len(twice)} of ")


def test_what_older_rows_do_not_tell_reads_not_recorded_there():
    word = {"architecture": "x", "status": "ran", "cache": "DynamicCache", "causal": True, "chunks": "rounding",
            "chunks, drift": {"float64": 1e-15}, "left padding": "rounding", "left padding, drift": {"float64": 1e-15},
            "left padding, token by token": "not applicable: the full pass itself changes with padding",
            "static cache": "wrong, and not declared", "static cache, drift": {"float64": 0.7},
            "cropped": "KeyError: 'x'", "cache as long as the prompt": "right"}  # fmt: skip
    tables._of_one_word(word)
    row = table.judged(word)
    assert {path: row[path] for path in tables.PATHS} == {
        "token by token": table.NOT_RECORDED, "chunks": "rounding", "static cache": "bug", "batch": table.NOT_RECORDED,
        "left padding": "rounding", "left padding, token by token": table.NOT_RECORDED, "cropped": table.RAISES,
        "cache as long as the prompt": table.NOT_RECORDED,
    }  # fmt: skip
    assert not table.is_declared(row, "static cache")


def test_each_processors_rows_say_which_paths_they_have():
    bare = {key: value for key, value in made("a").items() if not key.startswith("cropped")}
    found = tables.by_processor({"one": ROWS, "other": [bare]}).set_index("path")
    assert found.loc["chunks", "one"] == "2 exact or rounding, 1 bug"
    assert found.loc["cropped", "other"] == table.NOT_RECORDED


def test_of_the_recorded_run_none_is_silently_different_and_most_are_exact(results):
    switched = [tables.invariant(row) for row in results.rows if tables.invariant(row)]
    assert tables.DIFFERENT not in switched
    assert switched.count(table.EXACT) >= 0.95 * len(switched)


def test_a_share_of_few_architectures_is_not_judged_and_a_silent_difference_always_is(results):
    few = Results(results.run)
    few.__dict__["rows"] = [made("a"), made("b", row_invariant="different: logits")]
    outcomes = {name: check(one, few).outcome for name, one in statements.STATEMENTS.items()}
    assert outcomes.pop("none-differs-silently") == "fails"
    assert outcomes.pop("fp32-products-first") == outcomes.pop("bf16-attention-first") == "not run"
    assert set(outcomes.values()) == {"not run"}


def test_every_piece_of_a_bar_is_drawn_with_the_length_of_its_count(results):
    for draw, counted in (
        (figures.figure_outcomes, results.outcomes),
        (figures.figure_paths, results.paths),
    ):
        (ax,) = draw(counted).axes
        assert sum(patch.get_width() for patch in ax.patches) == counted["architectures"].sum()
        assert len(ax.patches) == len(counted)
    (ax,) = figures.figure_operations(results.operations).axes
    assert sum(patch.get_width() for patch in ax.patches) == results.operations["architectures"].sum()
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
    recorded = {key: value for key, value in made("llama").items() if key not in tables.PATHS}
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
