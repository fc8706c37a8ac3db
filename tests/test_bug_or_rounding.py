"""The chapter on bug or rounding: its rows, its verdicts, its words."""

import re

import pandas as pd
import pytest
from planted import changed
from quoted import quoted

from kvbook import paths
from kvbook.diagnosis import faults
from kvbook.errors import UserError
from kvbook.measuring.agreement import UNIT_ROUNDOFF
from kvbook.measuring.estimates import flat
from kvbook.models import loading
from kvreport.chapters.bug_or_rounding import figures, first_bad_layer, symptoms, tables, words
from kvreport.chapters.bug_or_rounding.results import Results
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.prompt_reuse import continuations
from kvreport.publishing import citation


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
    for family, case in {"llama": continuations.JOINED, "smollm2": continuations.DOCUMENTED}.items():
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


def test_the_bugs_layer_is_the_first_beyond_rounding(layers):
    (planted,) = layers.rows["planted_in"].dropna().unique()
    for bug in (first_bad_layer.LATE, first_bad_layer.NARROW):
        assert tables.first_beyond(layers.rows, "float64", bug) == planted
    assert tables.first_beyond(layers.rows, "float64", first_bad_layer.CLEAN) is None


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


def test_words_and_figures_can_be_made_of_these_rows_and_of_one_dtype(results, settings):
    alone = settings.model_copy(update={"families": (), "dtypes": ("bfloat16",)})
    for made in (results, Results.of(alone)):
        assert all(isinstance(value, str) and value for value in words.numbers(made).values())
        assert all(said["caption"] for said in words.captions(made).values())
        figures.figure_planted(tables.planted(made.lines), made.planted, words.labels(made.planted))
        figures.figure_symptoms(tables.of_documents(made.lines), made.symptoms)
        figures.figure_layers(made.layers)
        spread = flat(made.judged)
        # One dtype has no slope.
        assert spread["slope"].isna().all() if made is not results else spread["slope_low"].notna().any()


def test_every_computed_number_is_quoted_and_every_quoted_one_computed(results):
    assert set(words.numbers(results)) == quoted("09_bug_or_rounding")


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


def test_every_figure_begins_with_a_finding_that_a_title_can_hold(results):
    for name, said in words.captions(results).items():
        if name.startswith("fig-"):
            assert not citation.first_sentence(said["caption"]).endswith("…"), name


def harmless(results):
    """Give drift in proportion to the roundoff everywhere."""
    rows = results.drifts.rows
    return changed(results, drifts=rows.assign(drift=rows["dtype"].map(UNIT_ROUNDOFF)))


def test_the_caption_counts_the_bugs_that_were_found_and_not_those_that_were_planted(results):
    said = words._planted_found(results)
    bugs = re.search(r"planted bugs (\d+) of (\d+) bugs", said)
    assert bugs[1] == bugs[2]
    # What was planted would not be found.
    assert f"planted bugs 0 of {bugs[2]} bugs (slopes 1.00" in words._planted_found(harmless(results))
    harmful = changed(results, drifts=results.drifts.rows.assign(drift=1.0))
    assert re.search(r"clean families 0 of \d+ are called", words._planted_found(harmful))


def test_the_caption_of_symptoms_follows_their_verdicts(results):
    assert re.search(r"\d+ bug \(slopes", words._symptoms_found(results))
    said = words._symptoms_found(harmless(results))
    assert " bug " not in said
    assert "rounding (slopes 1.00)" in said


def test_the_caption_names_the_planted_layer_only_where_drift_begins_there(results):
    said = words._layer_found(results.by_layer)
    assert re.search(r"behind layer \d+, where both bugs were planted, and behind no layer", said)
    quiet = words._layer_found(changed(results, by_layer=results.by_layer.rows.assign(drift=0.0)).by_layer)
    assert "where both" not in quiet
    assert f"behind no layer for {first_bad_layer.LATE}" in quiet


def test_what_has_its_cause_taken_away_is_not_counted_among_the_documents_symptoms(results):
    assert {symptoms.CUT, symptoms.WITHIN, *symptoms.BLOG_NAMES.values()} >= symptoms.WITHOUT_THE_CAUSE
    found = results.symptoms
    own = found[tables.complained_of(found)]
    assert 0 < len(own) < len(found)
    assert symptoms.DRIFT in set(own["symptom"])
    assert not symptoms.WITHOUT_THE_CAUSE & set(own["symptom"])
    assert f"The documents' {len(own)} own symptoms" in words._symptoms_found(results)


@pytest.mark.parametrize(
    ("kinds", "answer"),
    [
        (["bug", "rounding", "exact"], "Sometimes it is, sometimes it is rounding."),
        (["bug", "undecided"], "Yes."),
        (["rounding", "exact"], "No, it is rounding."),
        (["exact"], "Neither a bug nor rounding was seen."),
    ],
)
def test_the_short_answer_follows_what_the_symptoms_were_called(kinds, answer):
    assert words.in_short(pd.Series(kinds)) == answer
