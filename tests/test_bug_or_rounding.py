"""The chapter on bug or rounding: its rows, its verdicts, its statements."""

import importlib.util
import re

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from planted import on_processor, with_rows

from kvbook import paths
from kvbook.diagnosis import faults
from kvbook.errors import UserError
from kvbook.measuring.estimates import flat
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvbook.models import loading
from kvreport.chapters.bug_or_rounding import figures, measures, rows, symptoms, tables
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.prompt_reuse.rows import DOCUMENTED, JOINED
from kvreport.publishing import documents, found, verdicts
from kvreport.publishing.statements import check


@pytest.fixture(scope="module")
def settings(family_folders, text_folder):
    return BugOrRoundingSettings.checked(
        model=str(family_folders["llama"]), corpus=str(text_folder),
        families=[str(family_folders[name]) for name in ("mpt", "falcon", "roberta")],
        n_samples=2, n_tokens=16, dtypes="float64,float32",
    )


@pytest.fixture(scope="module")
def results(settings):
    return found.measured("bug_or_rounding", settings)


@pytest.fixture(scope="module")
def table(results) -> pd.DataFrame:
    return results["verdicts"]


def test_a_vocabulary_that_joins_no_word_has_its_seam_where_the_documentation_has_a_space():
    for family, case in {"llama": JOINED, "smollm2": DOCUMENTED}.items():
        items = symptoms.broken_items(loading.tokenizer(family))
        assert {item.case for item in items} == {case}, family
        assert all(item.ids[: len(item.prefix_ids)] != item.prefix_ids for item in items)


def test_every_symptom_is_measured_once_for_every_text_and_dtype(results):
    drifts = results["bug_or_rounding"]
    assert not drifts.duplicated(["model", "dtype", "document", "symptom", "sample"]).any()
    assert set(drifts["dtype"]) == {"float64", "float32"}
    assert drifts["drift"].notna().all()


def test_injected_bugs_are_bugs_and_clean_families_are_not(results):
    planted = results["verdicts on planted"]
    clean = planted["symptom"] == rows.CLEAN
    assert set(planted.loc[clean, "kind"]) <= {"rounding", "exact"}
    assert set(planted.loc[~clean, "kind"]) == {"bug"}
    assert set(planted["model"]) == {"llama", "mpt", "falcon"}
    # Every bug was injected, the seam among them.
    assert set(planted["symptom"]) == {rows.CLEAN, *faults.FAULTS, faults.SEAM}


def test_a_documents_symptom_is_a_bug_where_the_prose_says_that_one_lies(table):
    kinds = table.groupby("symptom")["kind"].agg(set)
    # No GPT-2 is among these families.
    tried = [one for one in rows.SYMPTOMS if one.symptom != "GPT-2"]
    # Small models may agree to the bit where larger ones round.
    allowed = {one.symptom: {"bug"} if one.lies else {"rounding", "exact"} for one in tried}
    assert {name: kinds[name] for name in allowed if not kinds[name] <= allowed[name]} == {}


def test_fp32_inside_a_model_is_measured_in_fp64_alone_and_shows_in_mpt(results, table):
    inside = results["drifts"].query("symptom == @rows.NARROW_INSIDE")
    assert set(inside["dtype"]) == {"float64"}
    of_mpt = table[table["model"] == "mpt"].set_index("symptom")["kind"]
    assert of_mpt[[rows.NARROW_INSIDE, rows.CLEAN]].tolist() == ["bug", "rounding"]


def test_the_bugs_layer_is_the_first_beyond_rounding(results):
    first = results["first layers"].query("dtype == 'float64'").set_index("bug")
    injected = first.loc[[rows.LATE, rows.NARROW]]
    assert (injected["layer"] == results["first_bad_layer"]["planted_in"].max()).all()
    assert first.loc[rows.CLEAN, "layer"].isna().all()


def test_advice_stands_for_symptoms_that_are_measured_and_points_to_chapters_that_exist(table):
    chapters = {path.stem for path in paths.CHAPTERS.glob("*.ipynb")}
    for advice in tables.ADVICE:
        assert advice.symptom in set(table["symptom"]), advice
        named = re.findall(r"{doc}`[^<`]+<(\w+)>`", advice.evidence + advice.remedy)
        assert len(named) == (advice.evidence + advice.remedy).count("{doc}")
        assert set(named) <= chapters, advice


def test_the_verdicts_in_the_decision_table_are_this_runs_and_not_typed(table):
    first = tables.ADVICE[0]
    for kinds, shown in ((table["kind"], True), ("bug", False)):
        decided = tables.decisions(table.assign(kind=kinds))
        assert len(decided) == len(tables.ADVICE)
        # Where it is another verdict, the explanation is withheld.
        assert (first.cause in decided["what it is"][0]) is shown
    assert "not run" in tables.decisions(table.iloc[:0])["what it is"][0]


def test_figures_and_statements_can_be_made_of_these_rows_and_of_one_dtype(results, settings):
    alone = found.measured(
        "bug_or_rounding", settings.model_copy(update={"families": (), "dtypes": ("bfloat16",)})
    )
    # One dtype has no slope.
    for made, slopes in ((results, True), (alone, False)):
        lines, model = made["lines of planted"], made.noted("bug_or_rounding", "models", 0, "name")
        for fig in (
            figures.figure_planted(lines, model), figures.figure_against(lines, results["lines of planted"], model),
            figures.figure_symptoms(made["lines of symptoms"], made["symptoms"]), figures.figure_layers(made["layers"]),
        ):
            fig.draw_without_rendering()
            plt.close(fig)
        assert flat(made["verdicts"])["slope"].notna().any() == slopes
        assert {check(one, made).outcome for one in measures.STATEMENTS.values()} <= {
            "holds", "fails", "not resolved", "not run",
        }


def test_the_figure_of_symptoms_has_a_line_for_each_and_a_hollow_mark_for_zero(results):
    lines, table = results["lines of symptoms"], results["symptoms"]
    for drift, hollow in ((0.0, len(lines)), (0.1, 0)):
        fig = figures.figure_symptoms(lines.assign(drift=drift), table)
        marks = [line for line in fig.axes[0].lines if line.get_markerfacecolor() == "white"]
        labels = [label.get_text() for label in fig.axes[0].get_yticklabels()]
        plt.close(fig)
        assert len(marks) == hollow
        headings = {*table["document"], figures.FOUND_HEADING}
        assert [label for label in labels if label not in headings] == table["symptom"].map(rows.named).tolist()


def test_what_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    for change in ({"families": ("/nowhere",)}, {"device": "cuda:99"}, {"n_tokens": 999}, {"n_samples": 99}):
        with pytest.raises(UserError) as error:
            symptoms.EXPERIMENT.run(settings.model_copy(update=change))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def rounding(drifts: pd.DataFrame) -> pd.Series:
    return drifts["dtype"].map(UNIT_ROUNDOFF)


def bug(_drifts: pd.DataFrame) -> float:
    return 1.0


def nothing(_drifts: pd.DataFrame) -> float:
    return 0.0


def outcome(name, results, drift=lambda drifts: drifts["drift"]):
    """Check a statement of rows that drift otherwise, as if their few files were many."""
    many = {}
    for experiment in rows.EXPERIMENTS:
        given = results[experiment]
        given = given.assign(drift=drift(given))
        many[experiment] = pd.concat(
            given.assign(source=given["source"] + str(k), sample=given["sample"] + 100 * k) for k in range(20)
        )
    return check(measures.STATEMENTS[name], with_rows(results, **many)).outcome


CONTROLS = {
    "clean-shrinks": bug, "cause-removed": bug, "reported-rounding": bug, "bugs-stay": rounding, "bug-slope": rounding,
    "clean-slope": bug, "reported-bugs": rounding, "found-bugs": rounding, "fp32-inside-accuses-mpt": rounding,
    "plain-fp64-separates": bug, "first-layer-found": nothing, "clean-has-no-bad-layer": bug,
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_sentence_holds_here_and_fails_where_rounding_and_bug_drift_as_the_other_does(results, name):
    assert outcome(name, results) == "holds"
    assert outcome(name, results, CONTROLS[name]) == "fails"


@pytest.mark.parametrize(
    ("name", "maker", "hides"), [("fp32-inside-hides", "AMD", True), ("fp32-inside-hides-nothing", "Intel", False)]
)
def test_a_drift_is_said_to_be_hidden_only_where_the_logits_are_identical(results, name, maker, hides):
    there = on_processor(maker, results)
    assert outcome(name, there, nothing) == ("holds" if hides else "fails")
    assert outcome(name, there, bug) == ("fails" if hides else "holds")
    assert outcome(name, on_processor("another", results)) == "not run"


@pytest.mark.parametrize(
    ("name", "experiment", "column"),
    [("narrow-hides", "bug_or_rounding", "symptom"), ("coarse-hides-the-layer", "first_bad_layer", "bug")],
)
def test_a_narrow_cache_is_said_to_hide_only_where_it_does(results, name, experiment, column):
    coarse = results[experiment].query("dtype == 'float32'").assign(dtype="bfloat16", drift=0.01)
    assert outcome(name, with_rows(results, **{experiment: coarse})) == "holds"
    coarse.loc[coarse[column] == rows.NARROW, "drift"] = 0.05
    assert outcome(name, with_rows(results, **{experiment: coarse})) == "fails"


# What a re-run turned up, and no document shows.
UNREPORTED = {rows.WHOLE, rows.REPLY, rows.LAST_ONLY, "RoBERTa, past by hand"}


def number(measure, results) -> int:
    (of,) = measure(results)
    return int(of.estimate.value)


def test_what_no_document_reports_is_not_counted_as_reported(results):
    assert {one.symptom for one in rows.SYMPTOMS if one.whose == rows.FOUND} == UNREPORTED
    asked = tables.who_reports(results["counted"])
    assert len(asked) == number(measures.REPORTED, results)
    assert not {rows.named(name) for name in UNREPORTED} & set(asked["symptom"])
    assert asked["where"].str.len().all()


def test_a_symptom_is_counted_once_and_stands_in_the_ledger_if_it_names_a_claim():
    bugs = {one.symptom for one in rows.SYMPTOMS if one.whose == rows.REPORTED and one.lies}
    assert len({one.symptom for one in rows.SYMPTOMS}) == len(rows.SYMPTOMS)
    for symptom in rows.SYMPTOMS:
        claims = {claim["id"] for claim in documents.published(symptom.document)["claims"]}
        assert symptom.claim in claims | {""}, symptom
        # Nothing is said of a cause where there is no bug, or no document that reports one.
        assert symptom.lies or not symptom.inferred
        assert symptom.without in bugs | {""}


BEARS_OUT = {"other cause", "reproduced", "reproduced in kind", "reproduced on another real model"}


def published_by(chapter: str) -> list:
    if importlib.util.find_spec(f"kvreport.chapters.{chapter}.measures"):
        return list(found.published(chapter).values())
    return importlib.import_module(f"kvreport.chapters.{chapter}.results").Results.of_each_processor()


def test_a_cause_is_called_shown_where_the_ledger_bears_it_out_and_inferred_elsewhere():
    bugs = [one for one in rows.SYMPTOMS if one.whose == rows.REPORTED and one.lies]
    words: dict[str, set[str]] = {one.symptom: set() for one in bugs}
    for chapter in ("layer_drift", "prompt_reuse", "from_scratch", "blog_past"):
        claims, published = verdicts.of(chapter), published_by(chapter)
        for one in bugs:
            if claims.document == one.document and one.claim in claims.checks:
                words[one.symptom] = {claims.checks[one.claim](of).verdict for of in published}
    assert {name for name, said in words.items() if not said & BEARS_OUT} == {
        one.symptom for one in bugs if one.inferred
    }
    # Control: both kinds are there.
    assert 0 < sum(map(bool, words.values())) < len(bugs)
    assert any(said & BEARS_OUT for said in words.values())


def test_the_bugs_are_counted_by_where_they_lie(results):
    def counts(of: found.Found) -> list[int]:
        return [
            number(one, of) for one in (measures.BUGS_FED, measures.BUGS_PAST_BLOCK, measures.BUGS_IN_MODEL)
        ]

    here = counts(results)
    assert sum(here) == number(measures.REPORTED_BUGS, results)
    # Control: what drifts as rounding is counted among no bugs.
    drifts = results["bug_or_rounding"]
    fed = drifts["symptom"].isin([rows.FED_AGAIN, rows.ANEW])
    mended = drifts.assign(drift=drifts["drift"].mask(fed, rounding(drifts)))
    assert counts(with_rows(results, bug_or_rounding=mended)) == [0, *here[1:]]
    assert here[0] > 0
