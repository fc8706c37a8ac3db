"""The chapter on bug or rounding: its rows, its verdicts, its statements."""

import importlib.util
import re

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from planted import changed, moved_to

from kvbook import paths
from kvbook.diagnosis import faults
from kvbook.errors import UserError
from kvbook.measuring.estimates import flat
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvbook.models import loading
from kvreport.chapters.bug_or_rounding import figures, first_bad_layer, reported, statements, symptoms, tables
from kvreport.chapters.bug_or_rounding.results import Results
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.prompt_reuse.rows import DOCUMENTED, JOINED
from kvreport.publishing import documents, found
from kvreport.publishing import verdicts as ledger
from kvreport.publishing.statements import check


@pytest.fixture(scope="module")
def settings(family_folders, text_folder):
    return BugOrRoundingSettings.checked(
        model=str(family_folders["llama"]),
        families=[str(family_folders[family]) for family in ("mpt", "falcon", "roberta")],
        corpus=str(text_folder),
        n_samples=2,
        n_tokens=16,
        dtypes="float64,float32",
    )


@pytest.fixture(scope="module")
def results(settings):
    return Results.of(settings)


@pytest.fixture(scope="module")
def run(results):
    return results.drifts


@pytest.fixture(scope="module")
def layers(results):
    return results.by_layer


@pytest.fixture(scope="module")
def table(results) -> pd.DataFrame:
    return results.judged


def kinds(table: pd.DataFrame, **where: str) -> set[str]:
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table), where
    return set(table["kind"])


def test_a_vocabulary_that_joins_no_word_has_its_seam_where_the_documentation_has_a_space():
    for family, case in {"llama": JOINED, "smollm2": DOCUMENTED}.items():
        items = symptoms.broken_items(loading.tokenizer(family))
        assert {item.case for item in items} == {case}, family
        assert all(item.ids[: len(item.prefix_ids)] != item.prefix_ids for item in items)


def test_every_symptom_is_measured_once_for_every_text_and_dtype(run):
    assert not run.rows.duplicated(["model", "dtype", "document", "symptom", "sample"]).any()
    assert set(run.rows["dtype"]) == {"float64", "float32"}
    assert run.rows["drift"].notna().all()


def test_planted_bugs_are_bugs_and_clean_families_are_not(table):
    planted = tables.planted(table)
    assert kinds(planted, symptom=symptoms.CLEAN) <= {"rounding", "exact"}
    assert set(planted.loc[planted["symptom"] != symptoms.CLEAN, "kind"]) == {"bug"}
    assert set(planted["model"]) == {"llama", "mpt", "falcon"}
    # Every bug was planted, the seam among them.
    assert set(planted["symptom"]) == {symptoms.CLEAN, *faults.FAULTS, faults.SEAM}


@pytest.mark.parametrize(
    ("symptom", "kind"),
    [
        (symptoms.DRIFT, "rounding"),
        (symptoms.FED_AGAIN, "bug"),
        (symptoms.WHOLE, "bug"),
        (symptoms.WITHIN, "rounding"),
        (symptoms.PAST_BLOCK, "bug"),
        (symptoms.REPLY, "bug"),
        (symptoms.LAST_ONLY, "bug"),
        ("RoBERTa as posted", "bug"),
        ("RoBERTa made causal", "rounding"),
        ("RoBERTa, past by hand", "bug"),
        ("MPT, use_cache false", "bug"),
        ("MPT, use_cache true", "rounding"),
        ("Falcon of mid-2023", "bug"),
        ("Falcon today", "rounding"),
        (symptoms.STATIC_NONE, "rounding"),
    ],
)
def test_a_documents_symptom_is_what_its_chapter_found(table, symptom, kind):
    found = kinds(table, symptom=symptom)
    # Small models may agree to the bit where larger ones round.
    assert found <= ({"rounding", "exact"} if kind == "rounding" else {kind})


def test_a_prefix_cut_to_the_shared_ids_mends_what_the_seam_breaks(run, table):
    if symptoms.ANEW in set(run.rows["symptom"]):
        assert kinds(table, symptom=symptoms.ANEW) == {"bug"}
        assert kinds(table, symptom=symptoms.CUT) <= {"rounding", "exact"}
    else:
        # The small vocabulary joins no word with a full stop; the shipped one does.
        whole = BugOrRoundingSettings.checked(families=(), n_samples=1, n_tokens=8, dtypes="float64")
        found = tables.judged(symptoms.EXPERIMENT.run(whole).rows)
        assert kinds(found, symptom=symptoms.ANEW) == {"bug"}
        assert kinds(found, symptom=symptoms.CUT) <= {"rounding", "exact"}


def test_fp32_inside_a_model_is_measured_in_fp64_alone_and_shows_in_mpt(run, table):
    inside = run.rows[run.rows["symptom"] == symptoms.NARROW_INSIDE]
    assert set(inside["dtype"]) == {"float64"}
    assert kinds(table, symptom=symptoms.NARROW_INSIDE, model="mpt") == {"bug"}
    assert kinds(table, symptom=symptoms.CLEAN, model="mpt") == {"rounding"}


def test_the_bugs_layer_is_the_first_beyond_rounding(layers, results):
    (planted,) = layers.rows["planted_in"].dropna().unique()
    first = results.first_layers.query("dtype == 'float64'").set_index("bug")["layer"]
    assert set(first[[first_bad_layer.LATE, first_bad_layer.NARROW]]) == {planted}
    assert first[first_bad_layer.CLEAN].isna().all()


def test_advice_stands_for_symptoms_that_are_measured_and_points_to_chapters_that_exist(table):
    seen = set(zip(table["document"], table["symptom"], strict=True)) | {
        (symptoms.REUSE, symptoms.ANEW),
        (symptoms.REUSE, symptoms.CUT),
    }
    chapters = {path.stem for path in paths.CHAPTERS.glob("*.ipynb")}
    for advice in tables.ADVICE:
        assert advice.symptom in seen, advice
        named = re.findall(r"{doc}`[^<`]+<(\w+)>`", advice.evidence + advice.remedy)
        assert len(named) == (advice.evidence + advice.remedy).count("{doc}")
        assert set(named) <= chapters, advice


def test_the_verdicts_in_the_decision_table_are_this_runs_and_not_typed(table):
    decided = tables.decisions(table)
    assert len(decided) == len(tables.ADVICE)
    drift = decided.iloc[0]
    assert "rounding" in drift["what it is"]
    assert tables.ADVICE[0].cause in drift["what it is"]
    # Were it flat, the explanation by rounding would be withheld.
    flat = table.assign(kind="bug")
    assert tables.ADVICE[0].cause not in tables.decisions(flat).iloc[0]["what it is"]
    assert "not run" in tables.decisions(table.iloc[:0]).iloc[0]["what it is"]


def test_figures_and_statements_can_be_made_of_these_rows_and_of_one_dtype(results, settings):
    alone = settings.model_copy(update={"families": (), "dtypes": ("bfloat16",)})
    for made in (results, Results.of(alone)):
        lines = tables.planted(made.lines)
        drawn = [
            figures.figure_planted(lines, made.model),
            figures.figure_against(lines, tables.planted(results.lines), results.model),
            figures.figure_symptoms(tables.of_documents(made.lines), made.symptoms),
            figures.figure_layers(made.layers),
        ]
        for fig in drawn:
            fig.draw_without_rendering()
            plt.close(fig)
        spread = flat(made.judged)
        # One dtype has no slope.
        assert spread["slope"].isna().all() if made is not results else spread["slope_low"].notna().any()
        assert {check(one, made).outcome for one in statements.STATEMENTS.values()} <= {
            "holds", "fails", "not resolved", "not run",
        }


def test_the_figure_of_symptoms_has_a_line_for_each_and_a_hollow_mark_for_zero(results):
    lines, table = tables.of_documents(results.lines), results.symptoms

    def hollow(lines):
        fig = figures.figure_symptoms(lines, table)
        marks = [line for line in fig.axes[0].lines if line.get_markerfacecolor() == "white"]
        named = [label.get_text() for label in fig.axes[0].get_yticklabels()]
        plt.close(fig)
        assert [tables.named(symptom) for symptom in table["symptom"]] == [n for n in named if n not in documents]
        return len(marks)

    documents = {*table["document"], figures.FOUND_HEADING}
    assert hollow(lines.assign(drift=0.0)) == len(lines)
    assert hollow(lines.assign(drift=0.1)) == 0


def test_the_lines_are_means_at_the_roundoffs(run):
    lines = tables.lines(run.rows)
    assert (lines["roundoff"] == lines["dtype"].map(UNIT_ROUNDOFF)).all()
    one = run.rows[(run.rows["symptom"] == symptoms.DRIFT) & (run.rows["dtype"] == "float32")]
    found = lines[(lines["symptom"] == symptoms.DRIFT) & (lines["dtype"] == "float32")]
    assert found["drift"].item() == pytest.approx(one["drift"].mean())


def test_what_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    for change in ({"families": ("/nowhere",)}, {"device": "cuda:99"}, {"n_tokens": 999}, {"n_samples": 99}):
        with pytest.raises(UserError) as error:
            symptoms.EXPERIMENT.run(settings.model_copy(update=change))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def harmless(results):
    """Give drift in proportion to the roundoff everywhere."""
    rows = results.drifts.rows
    return changed(results, drifts=rows.assign(drift=rows["dtype"].map(UNIT_ROUNDOFF)))


def outcome(name, results):
    """Hold a statement against results as if their few files were many."""
    several = {}
    for field in ("drifts", "by_layer"):
        rows = getattr(results, field).rows
        copies = [rows.assign(source=rows["source"] + str(k), sample=rows["sample"] + 100 * k) for k in range(20)]
        several[field] = pd.concat(copies, ignore_index=True)
    return check(statements.STATEMENTS[name], changed(results, **several)).outcome


@pytest.mark.parametrize("name", ["clean-shrinks", "cause-removed", "reported-rounding"])
def test_what_the_prose_calls_rounding_is_and_is_not_where_it_drifts_as_a_bug(results, name):
    assert outcome(name, results) == "holds"
    rows = results.drifts.rows
    assert outcome(name, changed(results, drifts=rows.assign(drift=1.0))) == "fails"


@pytest.mark.parametrize("name", ["bugs-stay", "bug-slope", "reported-bugs", "found-bugs", "fp32-inside-accuses-mpt"])
def test_what_the_prose_calls_a_bug_is_and_is_not_where_it_drifts_as_rounding(results, name):
    assert outcome(name, results) == "holds"
    assert outcome(name, harmless(results)) != "holds"


def test_a_bug_is_said_to_be_found_in_its_layer_only_where_it_is(results):
    names = ("first-layer-found", "clean-has-no-bad-layer")
    assert {outcome(name, results) for name in names} == {"holds"}
    quiet = changed(results, by_layer=results.by_layer.rows.assign(drift=0.0))
    assert outcome("first-layer-found", quiet) == "fails"
    loud = changed(results, by_layer=results.by_layer.rows.assign(drift=1.0))
    assert outcome("clean-has-no-bad-layer", loud) == "fails"


def test_a_drift_is_said_to_be_hidden_only_where_the_logits_are_identical(results):
    rows = results.drifts.rows
    rows = rows.assign(drift=rows["drift"].where(rows["symptom"] != symptoms.NARROW_INSIDE, 0.0))
    for name, maker, hides in (("fp32-inside-hides", "AMD", True), ("fp32-inside-hides-nothing", "Intel", False)):
        there = moved_to(maker, results)
        assert outcome(name, changed(there, drifts=rows)) == ("holds" if hides else "fails")
        assert outcome(name, changed(there, drifts=rows.assign(drift=1e-15))) == ("fails" if hides else "holds")
        assert outcome(name, moved_to("another", results)) == "not run"


def test_a_narrow_cache_is_said_to_hide_only_where_it_does(results):
    rows = results.drifts.rows
    coarse = rows[rows["dtype"] == "float32"].assign(dtype="bfloat16", drift=0.01)
    rows = rows[rows["dtype"] != "bfloat16"]
    hidden = changed(results, drifts=pd.concat([rows, coarse]))
    assert outcome("narrow-hides", hidden) == "holds"
    coarse.loc[coarse["symptom"] == first_bad_layer.NARROW, "drift"] = 0.05
    assert outcome("narrow-hides", changed(results, drifts=pd.concat([rows, coarse]))) == "fails"


# What a re-run turned up, and no document shows.
UNREPORTED = {symptoms.WHOLE, symptoms.REPLY, symptoms.LAST_ONLY, "RoBERTa, past by hand"}


def test_what_no_document_reports_is_not_counted_as_reported(results):
    found = results.symptoms
    assert set(found["symptom"]) <= set(reported.BY_NAME)
    assert set(reported.names(reported.FOUND)) == UNREPORTED
    asked = tables.who_reports(found)
    assert len(asked) == int(statements.NUMBERS["reported"](results))
    assert not {tables.named(name) for name in UNREPORTED} & set(asked["symptom"])
    assert asked["where"].str.len().all()
    # A cause that is removed is removed from a bug that is reported.
    bugs = reported.names(reported.REPORTED, *reported.LIES)
    assert {one.without for one in reported.SYMPTOMS if one.without} <= set(bugs)


def test_a_symptom_is_counted_once_and_stands_in_the_ledger_if_it_names_a_claim():
    assert len(reported.BY_NAME) == len(reported.SYMPTOMS)
    for symptom in reported.SYMPTOMS:
        claims = {claim["id"] for claim in documents.published(symptom.document)["claims"]}
        assert symptom.claim in claims | {""}, symptom
        # Nothing is said of a cause where there is no bug, or no document that reports one.
        assert symptom.lies or not symptom.inferred


BEARS_OUT = {"other cause", "reproduced", "reproduced in kind", "reproduced on another real model"}


def published_by(chapter: str) -> list:
    if importlib.util.find_spec(f"kvreport.chapters.{chapter}.measures"):
        return list(found.published(chapter).values())
    return importlib.import_module(f"kvreport.chapters.{chapter}.results").Results.of_each_processor()


def test_a_cause_is_called_shown_where_the_ledger_bears_it_out_and_inferred_elsewhere():
    bugs = [one for one in reported.SYMPTOMS if one.whose == reported.REPORTED and one.lies]
    verdicts: dict[str, set[str]] = {}
    for chapter in ("layer_drift", "prompt_reuse", "from_scratch", "blog_past"):
        claims, published = ledger.of(chapter), published_by(chapter)
        for one in bugs:
            if claims.document == one.document and one.claim in claims.checks:
                check = claims.checks[one.claim]
                verdicts[one.name] = {check(of).verdict for of in published}
    assert {one.name for one in bugs if not verdicts.get(one.name, set()) & BEARS_OUT} == {
        one.name for one in bugs if one.inferred
    }
    # Control: both kinds are there.
    assert 0 < len(verdicts) < len(bugs)
    assert any(words & BEARS_OUT for words in verdicts.values())


def test_the_bugs_are_counted_by_where_they_lie(results):
    def counts(of: Results) -> list[int]:
        return [int(statements.NUMBERS[key](of)) for key in ("bugs_fed", "bugs_past_block", "bugs_in_model")]

    found = counts(results)
    assert sum(found) == int(statements.NUMBERS["reported_bugs"](results))
    # Control: what drifts as rounding is counted among no bugs.
    rows = results.drifts.rows
    fed = rows["symptom"].isin(reported.names(reported.REPORTED, reported.FED))
    mended = changed(results, drifts=rows.assign(drift=rows["drift"].mask(fed, rows["dtype"].map(UNIT_ROUNDOFF))))
    assert counts(mended) == [0, *found[1:]]
    assert found[0] > 0
