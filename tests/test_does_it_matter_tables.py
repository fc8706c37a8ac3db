"""The chapter's statistics are those that their names say, and its statements fail on rows that contradict them."""

import numpy as np
import pandas as pd
import pytest
import scipy
from made_up import changed, published, with_rows, with_runs

from kvbook.measuring.estimates import Estimate, flat
from kvreport.chapters.does_it_matter import figures, measures, tables
from kvreport.chapters.does_it_matter import rows as named
from kvreport.publishing import wording


@pytest.fixture(scope="module")
def results():
    """Return what is published of one processor; of six texts and some changes where all tokens are compared."""
    found = next(iter(published("does_it_matter").values()))
    some = [named.CACHED, named.OTHER_DTYPE, named.KV_INT4, named.FAULT]
    return with_rows(found, teacher_forced=found["teacher_forced"].query(f"sample < 6 and way in {some}"))


@pytest.fixture(scope="module")
def axes(results):
    return tables.axes(results)


def test_the_statistics_are_those_that_numpy_gives(results, axes):
    of = "dtype == 'bfloat16' and way == @named.KV_INT4"
    rows, found = results["teacher_forced"].query(of), axes.query(of).iloc[0]
    before, after = np.exp(-rows["nll"]), np.exp(-rows["nll"] + rows["dlogp"])
    expected = {
        "perplexity": np.exp(-np.log(before).mean()), "perplexity_way": np.exp(-np.log(after).mean()),
        "kl": rows["kl"].mean(), "kl_99": np.quantile(rows["kl"], 0.99), "mean_delta_p": (after - before).mean(),
        "rms_delta_p": np.sqrt(((after - before) ** 2).mean()), "same_top": 1 - rows["flip"].mean(),
    }
    for name, value in expected.items():
        assert found[name].value == pytest.approx(value), name
        assert found[name].low <= found[name].value <= found[name].high, name
    assert found["perplexity_ratio"].value == pytest.approx(expected["perplexity_way"] / expected["perplexity"])
    assert found["delta_p_1"] == pytest.approx(np.quantile(after - before, 0.01))


def test_streams_that_are_equal_differ_in_nothing_and_shares_keep_an_interval(results):
    table = tables.axes(changed(results, "teacher_forced", kl=0.0, dlogp=0.0, shift=0.0, flip=0.0))
    assert all(estimate == Estimate(0, 0, 0) for estimate in table["kl"])
    assert all(estimate == Estimate(1, 1, 1) for estimate in table["perplexity_ratio"])
    assert all(estimate.value == 1 and estimate.low < 1 for estimate in table["same_top"])
    assert (table["bits_equal_share"] == 1).all()


@pytest.mark.parametrize(("n_files", "kind"), [(2, "range"), (3, "range"), (4, "95 %")])
def test_the_unit_of_resampling_is_the_file_and_few_files_have_a_range(n_files, kind):
    # Files that disagree, each with many tokens: the interval is as wide as so few files leave it.
    rows = pd.DataFrame([{"source": str(k), "x": float(k)} for k in range(n_files) for _ in range(50)])
    found, last = measures.of_all_rows(np.mean, "x")(rows), n_files - 1
    assert (found.kind, found.value) == (kind, last / 2)
    assert found.high - found.low > 1 if kind == "95 %" else (found.low, found.high) == (0, last)


@pytest.mark.parametrize("size", [1.0, 1e-1, 1e-3, 1e-6])
def test_expected_flips_are_those_of_independent_margins_and_shifts(size):
    generator = np.random.default_rng(5)
    margins, shifts = generator.exponential(1.0, 4000), generator.normal(0, size, 4000)
    # The chance that a normal loss is larger than an exponential margin, by quadrature.
    loss = np.linspace(0, 8 * size, 20001)
    density = np.exp(-0.5 * (loss / size) ** 2) / (size * np.sqrt(2 * np.pi))
    exact = np.trapezoid(density * -np.expm1(-loss), loss)
    assert measures.expected_flips(margins, shifts) == pytest.approx(exact, rel=0.15)


def test_a_change_that_shifts_nothing_is_expected_to_flip_nothing_where_margins_are_zero():
    margins = np.repeat([0.0, 0.0625, 0.125, 4.0], 25)
    assert measures.expected_flips(margins, np.zeros(100)) == 0
    # A loss as large as the smallest margin that is not 0 takes those below it.
    assert measures.expected_flips(margins, np.full(100, -0.0625)) == pytest.approx(0.5)


def test_margins_hold_every_comparison_that_only_rounds(results):
    table = results["margins"]
    for dtype, part in results["teacher_forced"].query("way in @named.ROUNDING").groupby("dtype"):
        own = table[table["dtype"] == dtype]
        assert own["tokens"].sum() == len(part)
        assert own["flips"].sum() == part["flip"].sum()
        assert (own["predicted"].diff().dropna() <= 1e-12).all()
    assert flat(table)["seen"].notna().sum() == (table["tokens"] > 0).sum()


def test_a_loss_that_just_takes_a_margin_leaves_a_tie():
    losses = pd.Series([0.0, 1.0, 1.0, 2.0])
    # A margin of 1: one loss is larger and two leave a tie.  A margin of 0: three losses are larger.
    assert named.overtaken(np.array([1.0]), losses) == pytest.approx(1 / 4 + 2 / 8)
    assert named.overtaken(np.array([0.0]), losses) == pytest.approx(3 / 4)


def test_growth_of_what_grows_in_proportion_is_the_ratio_of_the_places(results):
    rows = results["drift_by_position"]
    # Bins 1 to 3 against 12 to 15; the control does not grow.
    for kl, expected in ((1.0 * rows["bin"], 13.5 / 2), (1e-3, 1)):
        growth = measures.OVER_THE_FIRST_QUARTER.where(place=named.LAST)
        found = growth(with_rows(results, drift_by_position=rows.assign(kl=kl)))
        assert [one.estimate.value for one in found] == pytest.approx([expected] * len(found))


def test_growth_along_long_texts_is_over_the_first_positions_of_those_that_reach_so_far():
    found = next(found for found in published("does_it_matter").values() if found["long_contexts"] is not None)
    rows = found["by position"].query("dtype == 'float32'")
    deepest = rows["bin"].max()
    far = rows[rows["bin"] == deepest]
    first = rows[(rows["bin"] == 0) & rows["sample"].isin(far["sample"])]
    (one,) = measures.ERROR_GROWTH.where(dtype="float32", bin=deepest)(found)
    assert one.estimate.value == pytest.approx(far["error"].mean() / first["error"].mean())
    assert one.units == far["source"].nunique() < rows["source"].nunique()
    # That processor read them in both dtypes.
    table = tables.by_position(published("does_it_matter")["AMD EPYC, Zen 4"])
    assert [one.value for one in table.loc[table["bin"] == 0, ["kl_growth", "error_growth"]].to_numpy().flat] == [1] * 4
    figures.figure_by_position(table)


def test_of_passes_that_never_differ_no_growth_is_told():
    found = published("does_it_matter")["AMD EPYC, Zen 4"]
    equal = changed(found, "long_contexts", "dtype == 'float32'", drift=0.0, kl=0.0)
    for growth in (measures.DRIFT_GROWTH, measures.DIVERGENCE_GROWTH, measures.STATIC_DRIFT):
        for of, dtypes in ((found, {"fp32", "bf16"}), (equal, {"bf16"})):
            assert {one.series.split()[0] for one in growth(of)} == dtypes
    assert measures.PIECES_EQUAL.where(dtype="float32")(equal)[0].estimate.value == 1
    table = tables.by_position(equal).query("dtype == 'float32'")
    assert table[["kl_growth", "drift_growth"]].isna().all(axis=None)
    top, fp32 = figures.figure_by_position(table).axes
    assert [len(ax.lines) for ax in (top, fp32)] == [1, 3], "the reference; and the errors of both passes"


def test_the_table_and_the_figure_of_changes_come_out_of_the_rows(results):
    table = tables.moved(results)
    figures.figure_moved(table)
    padded = results["one change"].query("dtype == 'bfloat16' and choice == 'sampled' and change == 'left padding'")
    (moved,) = measures.MOVED_BESIDE.where(dtype="bfloat16", choice="sampled", change=named.LEFT, beside="")(results)
    assert (moved.estimate.value, moved.units) == (padded["differs"].mean(), len(padded))
    assert tables.moved_grid(table)["sampled, bf16 (%)"].str.startswith(f"{100 * moved.estimate.value:.0f} [").any()
    counts = tables.cells(results).set_index("what became of it")["combinations"]
    assert (counts.sum(), counts["was run"]) == (3 * 60, 36)


@pytest.mark.parametrize(("sides", "tied"), [(("tied",), 1), (("tied_baseline",), 1), ((), 0)])
def test_a_divergence_counts_as_tied_where_either_side_is(results, sides, tied):
    neither = changed(results, "first_divergence", "parted == 1", tied=0.0, tied_baseline=0.0)
    here = changed(neither, "first_divergence", "parted == 1", **dict.fromkeys(sides, 1.0))["divergences"]
    assert set(here["tied"]) == {tied}


def test_the_other_dtype_is_compared_by_the_two_uncached_texts(results):
    written = changed(results, "first_divergence", path="'0 1 2 3'")
    written = changed(written, "first_divergence", "dtype == 'bfloat16' and sample % 2 == 1", path="'0 1 2 9'")
    texts = written["texts"].query("dtype == 'bfloat16' and choice == 'greedy' and way == @named.OTHER_DTYPE")
    assert texts["parted"].eq(texts["sample"] % 2).all()
    # Control: of a single dtype there is nothing to compare.
    alone = with_rows(results, first_divergence=results["first_divergence"].query("dtype == 'bfloat16'"))
    assert named.OTHER_DTYPE not in set(alone["texts"]["way"])


def test_what_is_said_of_both_backends_is_not_judged_where_one_is_missing():
    found = published("does_it_matter")["AMD EPYC"]
    alone = found["quantized_caches"].query("not way.str.contains('quanto')")
    assert measures.PERPLEXITY_IN_TWO_BITS(with_rows(found, quantized_caches=alone)) == []


def test_a_text_that_ended_early_and_never_diverged_counts_to_the_end(results):
    # Half of the texts diverge, and the others ended before these did.
    ended = changed(results, "first_divergence", steps=2, parted=0)
    half = changed(ended, "first_divergence", "sample % 2 == 1", steps=4, parted=1)
    (found,) = measures.EQUAL_AT_THE_END.where(choice=named.GREEDY, way=named.CACHED, dtype="bfloat16")(half)
    assert found.estimate.value == pytest.approx(0.5)


@pytest.mark.parametrize("parted", [0, 5, 19, 20])
def test_the_interval_of_texts_still_equal_is_that_of_kaplan_and_meiers_curve_at_its_end(parted):
    texts = pd.DataFrame({"parted": [1] * parted + [0] * (20 - parted)})
    found = measures.equal_at_the_end(texts)
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(1 - parted / 20)
    if 0 < parted < 20:
        curve = scipy.stats.ecdf(scipy.stats.CensoredData.right_censored(range(1, 21), 1 - texts["parted"])).sf
        ends = curve.confidence_interval(method="log-log")
        assert (found.low, found.high) == pytest.approx(tuple(float(end.evaluate(20)) for end in (ends.low, ends.high)))


@pytest.mark.parametrize("parted", [True, False])
def test_figures_and_tables_are_made_of_the_rows(results, axes, parted):
    results = results if parted else with_runs(results, after_divergence=None)
    figures.figure_margins(results["margins"])
    figures.figure_axes(axes.assign(kl=[Estimate(0, 0, 0), *axes["kl"][1:]]), book=axes)
    assert len(figures.figure_drift_and_snowball(tables.along(results), tables.snowball(results)).axes) == 1 + parted
    for shown in (tables.axes_grid(axes), tables.tails_grid(axes), tables.flips(results)):
        assert shown.notna().all(axis=None)


@pytest.mark.parametrize(("write", "estimate", "written"), [
    (wording.change, Estimate(1.001, 0.999, 1.003, "range"), "+0.10 [-0.10 to +0.30]"),
    (wording.change, Estimate(1.001, 0.999, 1.003), "+0.10 ± 0.20"),
    (wording.spread, Estimate(1.7e-4, 1.5e-4, 1.9e-4), "(1.7 ± 0.2) × 10⁻⁴"),
    (wording.spread, Estimate(2.0, 1.5, 2.5), "2.0 ± 0.5"),
    (wording.spread, Estimate(0, 0, 0), "0"),
    # A range is none that has a half.
    (wording.spread, Estimate(1.7e-4, 1.5e-4, 1.9e-4, "range"), "1.7 [1.5 to 1.9] × 10⁻⁴"),
])
def test_changes_and_small_numbers_are_written_with_half_their_interval_or_their_range(write, estimate, written):
    assert write(estimate) == written
