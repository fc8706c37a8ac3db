"""Measures: one estimate a group, absent rows give none, and a number in the prose is what its rows say."""

from dataclasses import replace

import pandas as pd
import pytest
from made_up import run_of
from refusing import refusal

from kvreport.publishing import estimators, evaluated, measures
from kvreport.publishing.estimators import mean, median, part, share, total
from kvreport.publishing.found import Found
from kvreport.publishing.judging import UNFITTED
from kvreport.publishing.measures import Measure, joined, noted, worded

DTYPES = ("float32", "bfloat16")


@pytest.fixture
def found() -> Found:
    """Twelve texts, each in two dtypes; in bf16 they drift by 8 more, and three are equal."""
    rows = pd.DataFrame({"dtype": DTYPES}).merge(pd.DataFrame({"sample": range(12)}), how="cross")
    fine = rows["dtype"] == "float32"
    rows = rows.assign(
        model="small", source=[f"file {k}" for k in rows["sample"]], drift=1.0 + rows["sample"] + 8 * ~fine,
        equal=fine | (rows["sample"] < 3),
    )
    frames = {
        "in bf16": lambda drift: drift[drift["dtype"] == "bfloat16"],
        "of the frame": lambda in_bf16: in_bf16.assign(twice=2 * in_bf16["drift"]),
        "gone": lambda not_there: not_there,
        "with or without": lambda drift, not_there=None: drift.assign(other=bool(not_there)),
    }
    return Found(frames, {"drift": run_of(rows, settings={"n": 3}), "not there": None})


EQUAL = Measure("share that is equal in {dtype}", "file", rows="drift", by=("model", "dtype"), estimate=share("equal"))
DRIFT = Measure(
    "drift over fp32's", "file", form="{:.1f}", rows="drift", by=("model", "dtype"), over=("dtype", "float32"),
    estimate=estimators.ratio_of_means("drift"),
)
DRIFTED = Measure("drift in bf16", rows="of the frame", estimate=part("drift", "twice"))
SUM = Measure("sum", rows="of the frame", estimate=total("twice"), form="{:,.0f}")
SETTING = noted("drift", "settings", "n")
GONE = Measure("gone", rows="gone", estimate=total("drift"))
WORDS, NO_WORDS = (worded(name, lambda rows: f"{len(rows)} rows") for name in ("in bf16", "gone"))
KNOWN = {"EQUAL": EQUAL, "DRIFT": DRIFT, "SUM": SUM, "DRIFTED": DRIFTED, "SETTING": SETTING, "WORDS": WORDS}


def test_each_group_has_its_estimate_its_units_and_a_name_with_what_was_chosen(found):
    given = [(of.series, of.estimate.value, of.units) for of in EQUAL(found)]
    assert given == [("small fp32", 1.0, 12), ("small bf16", 0.25, 12)]
    # One that stands alone is named all the same.
    assert [only.series for only in EQUAL.where(dtype="bfloat16")(found)] == ["small bf16"]
    # What was counted over all that there is has no units.
    assert [of.units for of in replace(EQUAL, estimate=part("equal"))(found)] == [None, None]
    assert EQUAL.where(dtype="float32").name == "share that is equal in fp32"
    assert EQUAL.where(dtype=DTYPES).name == "share that is equal in fp32 or bf16"


def test_a_ratio_of_times_is_taken_at_each_repeat_in_whatever_order_they_stand():
    rows = pd.DataFrame({"repeat": range(5), "s": [1.0, 2.0, 3.0, 4.0, 50.0]})
    twice = rows.assign(s=2 * rows["s"]).iloc[::-1]
    estimate = median("s")(twice, rows)
    assert (estimate.low, estimate.value, estimate.high) == (2, 2, 2)
    # Control: repeats that belong to others have other ratios.
    assert median("s")(twice.assign(repeat=range(5)), rows).low != 2
    assert median("s")(rows).value == 3
    assert median("s")(rows, rows.assign(repeat=9)) is None, "no repeat is in both"


def test_a_group_is_compared_with_its_partner_which_may_be_chosen_and_not_with_itself(found):
    (only,) = DRIFT(found)
    assert only.estimate.value == pytest.approx((6.5 + 8) / 6.5)
    # The partner need not be among what was chosen.
    assert [one.estimate.value for one in DRIFT.where(dtype="bfloat16")(found)] == [only.estimate.value]
    assert DRIFT.where(dtype="float32")(found) == []
    (only,) = replace(DRIFT, over=("dtype", lambda own, all_: min(all_)))(found)
    assert only.estimate.value == pytest.approx(6.5 / (6.5 + 8))


def test_what_was_not_run_has_no_estimate_and_what_cannot_be_estimated_says_so(found):
    assert GONE(found) == []
    unfitted = Measure("unfitted", "file", rows="drift", by=("dtype",), estimate=lambda rows: None)
    assert [one.estimate for one in unfitted(found)] == [UNFITTED, UNFITTED]
    assert unfitted.table(found).empty
    assert not found["with or without"]["other"].any()


def test_a_row_without_a_value_is_not_estimated_from_and_none_with_one_gives_no_estimate(found):
    rows = found["drift"].query("dtype == 'bfloat16'").drop(columns="dtype")
    unknown = rows.assign(drift=rows["drift"].where(rows["sample"] > 5), equal=rows["equal"].where(rows["sample"] > 1))
    assert mean("drift")(unknown).value == pytest.approx(9 + 8.5)
    assert share("equal")(unknown).value == 0.1
    assert estimators.ratio_of_means("drift")(rows, rows.assign(drift=0.0)) is None
    # Nor is a file counted that has no other rows.
    of_half = Found({}, {"drift": run_of(unknown.assign(dtype="bfloat16"))})
    means = replace(EQUAL, estimate=mean("drift"))
    assert [[one.units for one in means(of)] for of in (of_half, found)] == [[6], [12, 12]]
    assert [one("drift")(unknown.head(3)) for one in (mean, share, estimators.geometric_mean)] == [None] * 3
    # What has no logarithm has no place in a geometric mean.
    endless = rows.assign(drift=[0.0, float("inf")] + [2.0, 8.0] * 5)
    assert estimators.geometric_mean("drift")(endless).value == pytest.approx(4)
    threefold = rows.assign(drift=3 * rows["drift"]).sample(frac=1, random_state=0)
    assert estimators.geometric_mean("drift")(threefold, rows).value == pytest.approx(3)


def test_measures_stand_side_by_side_for_the_groups_that_all_have_or_that_any_has(found):
    columns = {"equal": EQUAL, "drift": DRIFT}
    assert joined(columns, found)["dtype"].tolist() == ["bfloat16"]
    any_has = joined(columns, found, "outer")
    assert any_has["dtype"].tolist() == ["float32", "bfloat16"]
    assert any_has["drift"].isna().tolist() == [True, False]


def test_rows_know_the_runs_that_they_are_made_of(found):
    assert found.behind("of the frame", "gone") == [found.runs["drift"]]
    # Control: a run that is not there is behind nothing.
    assert found.behind("gone") == []


def test_a_frame_and_an_estimate_are_made_once():
    made = []
    once = Found({"x": lambda drift: made.append("frame") or drift}, {"drift": run_of(pd.DataFrame({"drift": [1.0]}))})
    measure = Measure("x", rows="x", estimate=lambda rows: made.append("estimate") or total("drift")(rows))
    assert [measure(once)[0].estimate.value for _ in range(2)] == [1.0, 1.0]
    assert made == ["frame", "estimate"]


@pytest.mark.parametrize(("role", "text"), [
    ("SUM", "348"), ("SUM .1e", "3.5e+02"), ("SETTING", "3"), ("WORDS", "12 rows"),
    ("SUM rounded value ,.0f", "350"), ("SUM power", "3.5 × 10²"), ("SUM digit", "3 × 10²"),
    ("EQUAL dtype=bfloat16 count", "3 of 12"), ("DRIFTED count", "174 of 348"), ("DRIFTED .0%", "50%"),
    ("EQUAL dtype=bfloat16 value .0%", "25%"), ("EQUAL span .2f", "0.25 to 1.00"),
    ("EQUAL dtype=bfloat16 change", "-75.00 ± 22.17"), ("EQUAL dtype=bfloat16 spread", "2.5 [0.9, 5.3] × 10⁻¹"),
    ("EQUAL dtype=float32 units .0%", "100% [76%, 100%], 12 files"), ("DRIFT dtype=bfloat16 value", "2.2"),
    ('EQUAL model="small" dtype=float32 value', "1.00"),
])
def test_a_number_in_the_prose_is_written_as_it_asks(found, role, text):
    assert measures.written(role, KNOWN, found) == text


def test_a_number_is_written_as_its_span_over_all_that_was_recorded(found):
    other = Found(found.frames, found.runs | {"drift": run_of(found["drift"].assign(equal=True))})
    role = "EQUAL dtype=bfloat16 everywhere .2f"
    assert measures.written(role, KNOWN, found, [found, other]) == "0.25 to 1.00"
    assert measures.written(role.replace(".2f", "digit"), KNOWN, found, [found, other]) == "2 × 10⁻¹ to 1"
    assert measures.written(role, KNOWN, found) == "0.25"
    # What cannot be estimated somewhere bounds no span.
    unknown = Found(found.frames, found.runs | {"drift": run_of(found["drift"].assign(equal=float("nan")))})
    assert measures.written(role, KNOWN, found, [unknown, found]) == "0.25"


def test_what_was_not_run_is_written_as_not_recorded(found):
    known = {"GONE": GONE, "NOTE": noted("not there", "settings", "n"), "WORDS": NO_WORDS}
    assert {measures.written(role, known, found) for role in (*known, "GONE dtype=float32")} == {"not recorded there"}


@pytest.mark.parametrize(("role", "message"), [
    ("NOSUCH", "there is no measure NOSUCH"), ("EQUAL dtpye=float32", "no column dtpye"),
    ("EQUAL count span", "give one format"), ("EQUAL .1f .2f", "give one format"),
    ("SUM count", "only a share of units"), ('EQUAL dtype="float32', "a quotation mark is not closed"),
])
def test_a_misspelt_number_stops_in_one_line(found, role, message):
    assert message in refusal(measures.written, role, KNOWN, found)


def test_a_misspelt_value_is_not_taken_for_what_was_not_recorded(monkeypatch):
    monkeypatch.setattr(evaluated, "roles", lambda _: {"BY_DEPTH depth=nosuch"})
    assert "no row has these values" in refusal(evaluated._published, "blog_past")
