"""The chapter on bug or rounding: its rows, its verdicts, its statements."""

import re

import matplotlib.pyplot as plt
import pytest
from made_up import changed
from small_models import LLAMAS, drawn
from transformers import MistralConfig

from kvbook import paths
from kvbook.diagnosis import faults
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.models import loading
from kvreport.chapters.bug_or_rounding import BugOrRoundingSettings, figures, measures, rows, symptoms, tables
from kvreport.chapters.prompt_reuse.rows import DOCUMENTED, JOINED
from kvreport.publishing import documents, found
from kvreport.publishing.statements import check


@pytest.fixture(scope="module")
def settings(family_folders, text_folder):
    return BugOrRoundingSettings.checked(
        model=str(family_folders["llama"]), corpus=str(text_folder),
        families=[str(family_folders[name]) for name in ("mpt", "falcon", "roberta")],
        n_samples=2, n_tokens=16, dtypes="float64,bfloat16",
    )


def test_a_vocabulary_that_joins_no_word_has_its_seam_where_the_documentation_has_a_space():
    for family, case in {"llama": JOINED, "smollm2": DOCUMENTED}.items():
        items = symptoms.broken_items(loading.tokenizer(family))
        assert {item.case for item in items} == {case}, family
        assert all(item.ids[: len(item.prefix_ids)] != item.prefix_ids for item in items)


@pytest.mark.usefixtures("no_gradients")
def test_a_prefix_longer_than_a_window_is_cut_to_the_shared_ids():
    tokenizer = loading.tokenizer("llama")
    sizes = LLAMAS | {"num_hidden_layers": 2, "sliding_window": 5, "vocab_size": len(tokenizer)}
    made = symptoms.of_any_model(drawn(3, MistralConfig(**sizes)), tokenizer, [])
    drifts = [row["drift"] for row in made if row["symptom"] == rows.CUT]
    assert max(drifts) < 1e-4


def test_every_symptom_is_measured_once_for_every_text_and_dtype_and_fp32_inside_in_fp64_alone(results):
    drifts = results["drifts"]
    assert not drifts.duplicated(["model", "dtype", "document", "symptom", "sample"]).any()
    assert drifts["drift"].notna().all()
    dtypes = drifts.groupby("symptom")["dtype"].agg(set)
    assert dtypes.pop(rows.NARROW_INSIDE) == {"float64"}
    assert (dtypes == {"float64", "bfloat16"}).all()


def test_injected_bugs_are_bugs_and_clean_families_are_not(results):
    verdicts = results["verdicts"].query("document == @rows.INJECTED and symptom != @rows.NARROW_INSIDE")
    kinds = verdicts.pivot(index="symptom", columns="model", values="kind").fillna("does not apply")
    assert set(kinds) == {"small-llama", "small-mpt", "small-falcon"}
    assert set(kinds.loc[rows.CLEAN]) <= {"rounding", "exact"}
    bugs = kinds.drop(rows.CLEAN)
    # Every bug was injected, the seam among them; MPT has no positions to get wrong.
    assert set(bugs.index) == {*faults.FAULTS, faults.SEAM}
    assert set(bugs["small-llama"]) == set(bugs["small-falcon"]) == {"bug"}
    assert set(bugs["small-mpt"]) == {"bug", "does not apply"}


def test_a_documents_symptom_is_a_bug_where_the_prose_says_that_one_lies(results):
    kinds = results["verdicts"].groupby("symptom")["kind"].agg(set)
    # No GPT-2 is among these families; small models may agree to the bit where larger ones round.
    allowed = {one.symptom: {"bug"} if one.lies else {"rounding", "exact"} for one in rows.SYMPTOMS}
    assert {name for name in allowed if name != "GPT-2" and not kinds[name] <= allowed[name]} == set()


def test_the_bugs_layer_is_the_first_beyond_rounding(results):
    first = results["first layers"].query("dtype == 'float64'").set_index("bug")["layer"]
    assert (first[[rows.LATE, rows.NARROW]] == results["first_bad_layer"]["planted_in"].max()).all()
    assert first[rows.CLEAN].isna().all()


def test_advice_stands_for_symptoms_that_are_measured_and_points_to_chapters_that_exist(results):
    for line in tables.advice():
        assert line["symptom"] in set(results["verdicts"]["symptom"]), line
        text = line["evidence"] + line["remedy"]
        named = re.findall(r"{doc}`[^<`]+<(\w+)>`", text)
        assert len(named) == text.count("{doc}")
        assert set(named) <= {path.stem for path in paths.CHAPTERS.glob("*.ipynb")}, line


def test_the_verdicts_in_the_decision_table_are_this_runs_and_not_typed(results):
    table, cause = results["verdicts"], tables.advice()[0]["cause"]
    assert f"**rounding**: {cause}" in set(tables.decisions(table)["what it is"])
    # Where it is another verdict, the explanation is withheld.
    assert not tables.decisions(table.assign(kind="bug"))["what it is"].str.contains(cause).any()
    assert tables.decisions(table.iloc[:0])["what it is"].str.contains("not run").all()


def test_figures_and_statements_can_be_made_of_these_rows_and_of_one_dtype(results, settings):
    alone = found.measured("bug_or_rounding", settings.model_copy(update={"families": (), "dtypes": ("bfloat16",)}))
    for made in (results, alone):
        lines, model = made["lines of injected"], "small-llama"
        for fig in (
            figures.figure_injected(lines, model), figures.figure_against(lines, results["lines of injected"], model),
            figures.figure_symptoms(made["lines of symptoms"], made["symptoms"]), figures.figure_layers(made["layers"]),
        ):
            fig.draw_without_rendering()
            plt.close(fig)
    # One dtype has no slope, and says nothing of fp64.
    assert alone["verdicts"]["slope"].isna().all()
    assert {name: check(one, alone).outcome for name, one in measures.STATEMENTS.items()}["clean-shrinks"] == "not run"


# What a re-run turned up, and no document shows.
UNREPORTED = {rows.WHOLE, rows.REPLY, rows.LAST_ONLY, "RoBERTa, past by hand"}
REPORTED_BUGS = [one for one in rows.SYMPTOMS if one.whose == rows.REPORTED and one.lies]


def counts(results, *of) -> list[int]:
    return [int(one.estimate.value) for measure in of for one in measure(results)]


def test_what_no_document_reports_is_not_counted_as_reported(results):
    assert {one.symptom for one in rows.SYMPTOMS if one.whose == rows.FOUND} == UNREPORTED
    asked = tables.who_reports(results["counted"])
    assert [len(asked)] == counts(results, measures.REPORTED)
    assert not {rows.named(name) for name in UNREPORTED} & set(asked["symptom"])
    assert asked["where"].str.len().all()


def test_the_bugs_are_counted_by_where_they_lie(results):
    where = (measures.BUGS_FED, measures.BUGS_PAST_BLOCK, measures.BUGS_IN_MODEL)
    fed, *others = counts(results, *where)
    assert [fed + sum(others)] == counts(results, measures.REPORTED_BUGS)
    assert fed > 0
    # Control: what drifts as rounding is counted among no bugs.
    fed_again = f"symptom in {[rows.FED_AGAIN, rows.ANEW]}"
    mended = changed(results, "bug_or_rounding", fed_again, drift=lambda of: of["dtype"].map(UNIT_ROUNDOFF))
    assert counts(mended, *where) == [0, *others]


def test_a_symptom_is_counted_once_and_stands_in_the_ledger_if_it_names_a_claim():
    assert len({one.symptom for one in rows.SYMPTOMS}) == len(rows.SYMPTOMS)
    for symptom in rows.SYMPTOMS:
        claims = {claim["id"] for claim in documents.published(symptom.document)["claims"]}
        assert symptom.claim in claims | {""}, symptom
        # Nothing is said of a cause where there is no bug, or no document that reports one.
        assert symptom.lies or not symptom.inferred
        assert symptom.without in {"", *(one.symptom for one in REPORTED_BUGS)}


BEARS_OUT = {"other cause", "reproduced", "reproduced in kind", "reproduced on another real model"}
CHAPTERS = {rows.ISSUE: "layer_drift", rows.REUSE: "prompt_reuse", rows.SCRATCH: "from_scratch", rows.BLOG: "blog_past"}


def is_borne_out(symptom: rows.Symptom) -> bool:
    chapter = CHAPTERS[symptom.document]
    check = found.measures_of(chapter).CHECKS.get(symptom.claim)
    return check is not None and any(check(of).verdict in BEARS_OUT for of in found.published(chapter).values())


def test_a_cause_is_called_shown_where_the_ledger_bears_it_out_and_inferred_elsewhere():
    assert [is_borne_out(one) for one in REPORTED_BUGS] == [not one.inferred for one in REPORTED_BUGS]
    # Control: both kinds are there.
    assert {one.inferred for one in REPORTED_BUGS} == {True, False}
