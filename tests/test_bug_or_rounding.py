"""The chapter on bug or rounding: its rows, its verdicts, its words."""

import dataclasses
import re

import pandas as pd
import pytest

from kvbook import paths
from kvbook.diagnosis import faults
from kvbook.errors import UserError
from kvbook.measuring.agreement import UNIT_ROUNDOFF
from kvreport.chapters.bug_or_rounding import figures, first_bad_layer
from kvreport.chapters.bug_or_rounding import symptoms as experiment
from kvreport.chapters.bug_or_rounding import tables as analysis
from kvreport.chapters.bug_or_rounding import words as text
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
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
def run(settings):
    return experiment.run(settings)


@pytest.fixture(scope="module")
def layers(settings):
    return first_bad_layer.run(settings)


@pytest.fixture(scope="module")
def table(run) -> pd.DataFrame:
    return analysis.judged(run.rows)


def kinds(table: pd.DataFrame, **where: str) -> set[str]:
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table), where
    return set(table["kind"])


def test_every_symptom_is_measured_once_for_every_text_and_dtype(run):
    assert not run.rows.duplicated(["model", "dtype", "document", "symptom", "sample"]).any()
    assert set(run.rows["dtype"]) == {"float64", "float32"}
    assert run.rows["drift"].notna().all()


def test_planted_bugs_are_bugs_and_clean_families_are_not(table):
    planted = analysis.planted(table)
    assert kinds(planted, symptom=experiment.CLEAN) <= {"rounding", "exact"}
    assert set(planted.loc[planted["symptom"] != experiment.CLEAN, "kind"]) == {"bug"}
    assert set(planted["model"]) == {"llama", "mpt", "falcon"}
    # Every bug was planted, the seam among them.
    assert set(planted["symptom"]) == {experiment.CLEAN, *faults.FAULTS, faults.SEAM}


@pytest.mark.parametrize(
    ("symptom", "kind"),
    [
        (experiment.DRIFT, "rounding"),
        (experiment.FED_AGAIN, "bug"),
        (experiment.WHOLE, "bug"),
        (experiment.WITHIN, "rounding"),
        (experiment.PAST_BLOCK, "bug"),
        (experiment.REPLY, "bug"),
        (experiment.LAST_ONLY, "bug"),
        ("RoBERTa as posted", "bug"),
        ("RoBERTa made causal", "rounding"),
        ("RoBERTa, past by hand", "bug"),
        ("MPT, use_cache false", "bug"),
        ("MPT, use_cache true", "rounding"),
        ("Falcon of mid-2023", "bug"),
        ("Falcon today", "rounding"),
        (experiment.STATIC_NONE, "rounding"),
    ],
)
def test_a_documents_symptom_is_what_its_chapter_found(table, symptom, kind):
    found = kinds(table, symptom=symptom)
    # Small models may agree to the bit where larger ones round.
    assert found <= ({"rounding", "exact"} if kind == "rounding" else {kind})


def test_a_prefix_cut_to_the_shared_ids_mends_what_the_seam_breaks(run, table):
    if experiment.ANEW in set(run.rows["symptom"]):
        assert kinds(table, symptom=experiment.ANEW) == {"bug"}
        assert kinds(table, symptom=experiment.CUT) <= {"rounding", "exact"}
    else:
        # The small vocabulary joins no word with a full stop; the shipped one does.
        whole = BugOrRoundingSettings.checked(families=(), n_samples=1, n_tokens=8, dtypes="float64")
        found = analysis.judged(experiment.run(whole).rows)
        assert kinds(found, symptom=experiment.ANEW) == {"bug"}
        assert kinds(found, symptom=experiment.CUT) <= {"rounding", "exact"}


def test_fp32_inside_a_model_is_measured_in_fp64_alone_and_shows_in_mpt(run, table):
    inside = run.rows[run.rows["symptom"] == experiment.NARROW_INSIDE]
    assert set(inside["dtype"]) == {"float64"}
    assert kinds(table, symptom=experiment.NARROW_INSIDE, model="mpt") == {"bug"}
    assert kinds(table, symptom=experiment.CLEAN, model="mpt") == {"rounding"}


def test_the_bugs_layer_is_the_first_beyond_rounding(layers):
    (planted,) = layers.rows["planted_in"].dropna().unique()
    for bug in (first_bad_layer.LATE, first_bad_layer.NARROW):
        assert analysis.first_beyond(layers.rows, "float64", bug) == planted
    assert analysis.first_beyond(layers.rows, "float64", first_bad_layer.CLEAN) is None


def test_advice_stands_for_symptoms_that_are_measured_and_points_to_chapters_that_exist(table):
    seen = set(zip(table["document"], table["symptom"], strict=True)) | {
        (experiment.REUSE, experiment.ANEW),
        (experiment.REUSE, experiment.CUT),
    }
    chapters = {path.stem for path in paths.CHAPTERS.glob("*.ipynb")}
    for advice in analysis.ADVICE:
        assert advice.symptom in seen, advice
        named = re.findall(r"{doc}`[^<`]+<(\w+)>`", advice.evidence + advice.remedy)
        assert len(named) == (advice.evidence + advice.remedy).count("{doc}")
        assert set(named) <= chapters, advice


def test_the_verdicts_in_the_decision_table_are_this_runs_and_not_typed(table):
    decided = analysis.decisions(table)
    assert len(decided) == len(analysis.ADVICE)
    drift = decided.iloc[0]
    assert "rounding" in drift["what it is"]
    assert analysis.ADVICE[0].cause in drift["what it is"]
    # Were it flat, the explanation by rounding would be withheld.
    flat = table.assign(kind="bug")
    assert analysis.ADVICE[0].cause not in analysis.decisions(flat).iloc[0]["what it is"]
    assert "not run" in analysis.decisions(table.iloc[:0]).iloc[0]["what it is"]


def test_words_and_figures_can_be_made_of_these_rows_and_of_one_dtype(run, layers, settings):
    alone = settings.model_copy(update={"families": (), "dtypes": ("bfloat16",)})
    for made, profile in ((run, layers), (experiment.run(alone), first_bad_layer.run(alone))):
        table, lines = analysis.judged(made.rows), analysis.lines(made.rows)
        assert all(isinstance(value, str) and value for value in text.numbers(made.rows).values())
        assert all(words["caption"] for words in text.captions(made, profile).values())
        planted = analysis.planted(table)
        figures.figure_planted(analysis.planted(lines), planted, text.labels(planted))
        figures.figure_symptoms(analysis.symptoms(lines), analysis.symptoms(table))
        figures.figure_layers(analysis.layers(profile.rows))
        assert set(analysis.flat(table)["slope"].map(type)) <= {float, type(None)}


def test_the_lines_are_means_at_the_roundoffs(run):
    lines = analysis.lines(run.rows)
    assert (lines["roundoff"] == lines["dtype"].map(UNIT_ROUNDOFF)).all()
    one = run.rows[(run.rows["symptom"] == experiment.DRIFT) & (run.rows["dtype"] == "float32")]
    found = lines[(lines["symptom"] == experiment.DRIFT) & (lines["dtype"] == "float32")]
    assert found["drift"].item() == pytest.approx(one["drift"].mean())


def test_what_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    for change in ({"families": ("/nowhere",)}, {"device": "cuda:99"}, {"n_tokens": 999}, {"n_samples": 99}):
        with pytest.raises(UserError) as error:
            experiment.run(settings.model_copy(update=change))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_every_figure_begins_with_a_finding_that_a_title_can_hold(run, layers):
    for name, said in text.captions(run, layers).items():
        if name.startswith("fig-"):
            assert not citation.first_sentence(said["caption"]).endswith("…"), name


def test_the_caption_counts_the_bugs_that_were_found_and_not_those_that_were_planted(run):
    said = text._planted_found(run.rows)
    bugs = re.search(r"planted bugs (\d+) of (\d+) bugs", said)
    assert bugs[1] == bugs[2]
    # Drift in proportion to the roundoff everywhere: what was planted would not be found.
    harmless = run.rows.assign(drift=run.rows["dtype"].map(UNIT_ROUNDOFF))
    assert f"planted bugs 0 of {bugs[2]} bugs (slopes 1.00" in text._planted_found(harmless)
    harmful = run.rows.assign(drift=1.0)
    assert re.search(r"clean families 0 of \d+ are called", text._planted_found(harmful))


def test_the_caption_of_symptoms_follows_their_verdicts(run):
    assert re.search(r"\d+ bug \(slopes", text._symptoms_found(run.rows))
    harmless = run.rows.assign(drift=run.rows["dtype"].map(UNIT_ROUNDOFF))
    assert " bug " not in text._symptoms_found(harmless)
    assert "rounding (slopes 1.00)" in text._symptoms_found(harmless)


def test_the_caption_names_the_planted_layer_only_where_drift_begins_there(layers):
    assert re.search(r"behind layer \d+, where both bugs were planted, and behind no layer", text._layer_found(layers))
    quiet = dataclasses.replace(layers)
    quiet.__dict__["rows"] = layers.rows.assign(drift=0.0)
    assert "where both" not in text._layer_found(quiet)
    assert f"behind no layer for {first_bad_layer.LATE}" in text._layer_found(quiet)


def test_what_has_its_cause_taken_away_is_not_counted_among_the_documents_symptoms(table, run):
    assert {experiment.CUT, experiment.WITHIN, *experiment.BLOG_NAMES.values()} >= experiment.WITHOUT_THE_CAUSE
    symptoms = analysis.symptoms(table)
    own = symptoms[analysis.complained_of(symptoms)]
    assert 0 < len(own) < len(symptoms)
    assert experiment.DRIFT in set(own["symptom"])
    assert not experiment.WITHOUT_THE_CAUSE & set(own["symptom"])
    assert f"The documents' {len(own)} own symptoms" in text._symptoms_found(run.rows)


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
    assert text.in_short(pd.Series(kinds)) == answer
