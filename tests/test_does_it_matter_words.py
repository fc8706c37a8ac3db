"""The chapter's statistics are those that their names say, and its words follow the rows."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from planted import changed, run_of
from quoted import quoted

from kvbook.measuring import estimates as fits
from kvreport.chapters.does_it_matter import (
    drift_by_position,
    figures,
    first_divergence,
    laid_out,
    tables,
    variants,
    words,
)
from kvreport.chapters.does_it_matter.results import Results
from kvreport.publishing import citation

ABOUT = {
    "settings": {"n_samples": 6, "n_tokens": 40, "dtypes": ["float32", "bfloat16"]},
    "models": [{"name": "made up", "weights": "local", "layers": 2, "parameters": 1e6}],
    "corpus": {"corpus": "folder"},
    "machine": {"device_name": "none", "torch": "0"},
}
# How far each dtype's rounding is from the other's; what has few bits depends on neither.
SIZE = {"float32": 1e-6, "bfloat16": 3e-2}


def run(rows):
    return run_of(pd.DataFrame(rows), **ABOUT)


@pytest.fixture(scope="module")
def forced():
    generator = np.random.default_rng(2)
    rows = []
    for dtype, rounding in SIZE.items():
        for sample in range(6):
            margins, nll = generator.exponential(1.5, 20), generator.exponential(2.0, 20)
            for way in variants.VARIANTS:
                size = rounding if way.kind == "rounding" else 0.3
                shifts = generator.normal(0, size, 20)
                rows += [
                    {
                        "dtype": dtype, "way": way.name, "sample": sample, "source": f"{sample}.py", "position": 20 + k,
                        "nll": nll[k], "dlogp": generator.normal(0, size), "kl": shifts[k] ** 2 / 4,
                        "flip": float(shifts[k] < -margins[k]), "margin": margins[k], "shift": shifts[k],
                        "ulp": 2.0**-20 if dtype == "float32" else 2.0**-4, "decision_flip": 0, "decision_right": 1,
                    }
                    for k in range(20)
                ]  # fmt: skip
    return run(rows)


@pytest.fixture(scope="module")
def axes(results):
    return results.axes


def test_the_statistics_are_those_that_numpy_gives(forced, axes):
    rows = forced.rows.query("dtype == 'bfloat16' and way == 'KV cache in int4'")
    found = axes.query("dtype == 'bfloat16' and way == 'KV cache in int4'").iloc[0]
    before, behind = np.exp(-rows["nll"]), np.exp(-rows["nll"] + rows["dlogp"])
    expected = {
        "perplexity": np.exp(-np.log(before).mean()),
        "perplexity_way": np.exp(-np.log(behind).mean()),
        "kl": rows["kl"].mean(),
        "kl_99": np.quantile(rows["kl"], 0.99),
        "mean_delta_p": (behind - before).mean(),
        "rms_delta_p": np.sqrt(((behind - before) ** 2).mean()),
        "same_top": 1 - rows["flip"].mean(),
    }
    for name, value in expected.items():
        assert found[name].value == pytest.approx(value), name
        assert found[name].low <= found[name].value <= found[name].high, name
    assert found["perplexity_ratio"].value == pytest.approx(expected["perplexity_way"] / expected["perplexity"])
    assert found["delta_p_1"] == pytest.approx(np.quantile(behind - before, 0.01))


def test_streams_that_are_equal_differ_in_nothing_and_shares_keep_an_interval(forced):
    equal = forced.rows.assign(kl=0.0, dlogp=0.0, shift=0.0, flip=0.0)
    table = tables.axes_table(equal)
    assert all(estimate == fits.Estimate(0, 0, 0) for estimate in table["kl"])
    assert all(estimate == fits.Estimate(1, 1, 1) for estimate in table["perplexity_ratio"])
    assert all(estimate.value == 1 and estimate.low < 1 for estimate in table["same_top"])
    assert (table["bits_equal_share"] == 1).all()


def test_the_unit_of_resampling_is_the_file():
    # Two files that disagree, each with many tokens: the interval is as wide as two files leave it.
    files = [np.full((500, 1), value) for value in (0.0, 1.0)]
    found = tables.resampled(files, lambda kept: kept.mean())
    assert (found.low, found.value, found.high) == (0, 0.5, 1)


@pytest.mark.parametrize("size", [1.0, 1e-1, 1e-3, 1e-6])
def test_expected_flips_are_those_of_independent_margins_and_shifts(size):
    generator = np.random.default_rng(5)
    margins, shifts = generator.exponential(1.0, 4000), generator.normal(0, size, 4000)
    # The chance that a normal loss is larger than an exponential margin, by quadrature.
    loss = np.linspace(0, 8 * size, 20001)
    density = np.exp(-0.5 * (loss / size) ** 2) / (size * np.sqrt(2 * np.pi))
    exact = np.trapezoid(density * -np.expm1(-loss), loss)
    assert tables.expected_flips(margins, shifts) == pytest.approx(exact, rel=0.15)


def test_control_counting_flips_alone_says_nothing_where_none_was_seen():
    generator = np.random.default_rng(5)
    margins, shifts = generator.exponential(1.0, 4000), generator.normal(0, 1e-6, 4000)
    assert (shifts < -margins).sum() == 0 < tables.expected_flips(margins, shifts) < 1e-5


def test_margins_hold_every_comparison_that_only_rounds(forced):
    table = tables.margins_table(forced.rows)
    rounding = forced.rows[forced.rows["way"].isin([way.name for way in variants.VARIANTS if way.kind == "rounding"])]
    for dtype, part in rounding.groupby("dtype"):
        own = table[table["dtype"] == dtype]
        assert own["tokens"].sum() == len(part)
        assert own["flips"].sum() == part["flip"].sum()
        assert (own["predicted"].diff().dropna() <= 1e-12).all()
    assert fits.flat(table)["seen"].notna().sum() == (table["tokens"] > 0).sum()


def test_a_loss_that_just_takes_a_margin_leaves_a_tie():
    losses = pd.Series([0.0, 1.0, 1.0, 2.0])
    # A margin of 1: one loss is larger and two leave a tie.  A margin of 0: three losses are larger.
    assert tables._overtaken(np.array([1.0]), losses) == pytest.approx(1 / 4 + 2 / 8)
    assert tables._overtaken(np.array([0.0]), losses) == pytest.approx(3 / 4)


def test_a_divergence_is_placed_below_the_next_larger_published_one():
    published = tables.elsewhere()
    first, last = published.iloc[0], published.iloc[-1]
    assert first["mean_kl_nats"] == published["mean_kl_nats"].min()
    assert tables.smaller_than(fits.Estimate(0, 0, first["mean_kl_nats"] / 2), published) == first["what"]
    assert (
        tables.smaller_than(fits.Estimate(0, 0, first["mean_kl_nats"] * 1.01), published) == published["what"].iloc[1]
    )
    assert tables.smaller_than(fits.Estimate(1, 1, last["mean_kl_nats"] * 2), published) == "none of these"


@pytest.fixture(scope="module")
def parting():
    ways = [first_divergence.WRITER, *(way.name for way in first_divergence.WATCHED), first_divergence.ASSISTED]
    return run(
        {
            "dtype": dtype, "choice": choice, "way": way, "sample": sample, "source": f"{sample}.py",
            "steps": 20 if dtype == "float32" else 4 + sample, "parted": int(dtype == "bfloat16" and sample % 2),
        }
        for dtype in SIZE for choice in first_divergence.CHOICES for way in ways for sample in range(6)
        if (choice, way) != (first_divergence.SAMPLED, first_divergence.ASSISTED)
    )  # fmt: skip


@pytest.fixture(scope="module")
def positions():
    return run(
        {
            "dtype": dtype, "way": way, "sample": sample, "source": f"{sample}.py", "bin": place, "read_from": 4 * place,
            "read_to": 4 * place + 4, "n_tokens": 4, "kl": SIZE[dtype] * place, "flips": 0,
        }
        for dtype in SIZE for way in ("cache, 64 tokens at once", "KV cache in int8") for sample in range(2)
        for place in range(1, 16)
    )  # fmt: skip


@pytest.fixture(scope="module")
def behind():
    return run(
        {
            "dtype": "bfloat16", "sample": sample, "source": f"{sample}.py", "offset": offset, "kl_forced": 1e-4,
            "kl_free": 2.0 if offset > 0 else 1e-4, "token_equal": int(offset < 0),
        }
        for sample in range(2) for offset in range(-3, 5)
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(forced, positions, parting, behind):
    return Results(forced, positions, parting, behind)


def test_growth_of_what_grows_in_proportion_is_the_ratio_of_the_places(positions):
    grown = tables.growth(positions.rows)
    # Bins 1 to 3 against 12 to 15.
    assert [row.ratio.value for row in grown.itertuples()] == pytest.approx([13.5 / 2] * 4)
    level = positions.rows.assign(kl=1e-3)
    assert all(row.ratio.value == pytest.approx(1) for row in tables.growth(level).itertuples())


def test_partings_put_seen_and_expected_side_by_side(results):
    table = results.partings
    wrote = table[table["way"] == first_divergence.WRITER].set_index("dtype")
    assert wrote.loc["float32", "greedy_parted"] == "0 of 6"
    assert wrote.loc["bfloat16", "greedy_parted"] == "3 of 6"
    assert wrote.loc["float32", "position"] > 100 * wrote.loc["bfloat16", "position"]
    assert wrote.loc["bfloat16", "expected"] < wrote.loc["float32", "expected"] < 1


def test_assisted_decoding_is_expected_to_part_as_its_verification_is_and_does_not_draw(axes, results):
    table = results.partings.set_index(["dtype", "way"])
    known = axes.set_index(["dtype", "way"])["expected_flips"]
    for dtype in SIZE:
        row = table.loc[(dtype, first_divergence.ASSISTED)]
        assert row["expected_flips"] == known[dtype, variants.CHUNKS.name]
        assert row["greedy_parted"] == ("0 of 6" if dtype == "float32" else "3 of 6")
    shown = laid_out.partings_shown(table.reset_index()).set_index(["way", "dtype"])
    cells = shown.loc[first_divergence.ASSISTED]
    assert list(cells["parted, sampled"]) == ["", ""]
    assert "" not in list(cells["parted, greedy"])


def test_of_few_files_a_statistic_of_tokens_and_a_change_have_a_range():
    for n_files, kind in ((3, "range"), (4, "95 %")):
        files = [np.full((50, 2), float(number)) for number in range(n_files)]
        found = tables.resampled(files, lambda kept: kept.mean())
        assert found.kind == kind
    assert (tables.resampled(files[:3], lambda kept: kept.mean()).low, found.value) == (0.0, 1.5)
    assert laid_out.change(fits.Estimate(1.001, 0.999, 1.003, "range")) == "+0.10 [-0.10 to +0.30]"
    assert laid_out.change(fits.Estimate(1.001, 0.999, 1.003)) == "+0.10 ± 0.20"


def test_the_cache_is_held_against_the_dtype_and_not_against_nothing(axes):
    other = variants.OTHER_DTYPE.name
    alone = axes[axes["way"].isin([words.CACHE, other]) & (axes["dtype"] == "bfloat16")].copy()
    for factor, said in ((1.0, "50%"), (1e-6, "<1%"), (2.0, "100%")):
        sizes = {words.CACHE: factor, other: 2.0}
        alone["kl"] = [fits.Estimate(sizes[way], 0, 9) for way in alone["way"]]
        assert words.over_the_dtype(alone) == f"{said} in bf16"
    assert words.over_the_dtype(alone[alone["way"] == words.CACHE]) == "not run"


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (1e-6, "next to nothing"), (0.5, "less than a change of dtype"), (2.0, "about as much as a change of dtype"),
        (9.0, "more than a change of dtype"),
    ],
)  # fmt: skip
def test_the_short_answer_follows_the_caches_divergence_over_the_dtypes(axes, cache, said):
    sizes = {words.CACHE: cache, variants.OTHER_DTYPE.name: 2.0}
    alone = axes[axes["way"].isin(sizes) & (axes["dtype"] == "bfloat16")].copy()
    alone["kl"] = [fits.Estimate(sizes[way], 0, 9) for way in alone["way"]]
    assert words.in_short(alone) == f"It moves predictions {said} in bf16."
    assert words.in_short(alone[alone["way"] == words.CACHE]) == "That was not run."


@pytest.mark.parametrize("parted", [True, False])
def test_every_number_of_the_prose_and_every_figure_comes_from_the_rows(results, parted):
    results = results if parted else dataclasses.replace(results, behind=None)
    said = words.numbers(results)
    assert set(said) == quoted("10_does_it_matter")
    assert ("not seen" in said["behind_parting"]) != parted
    captions = words.captions(results)
    assert all("torch" in caption["caption"] for caption in captions.values())
    assert len(figures.figure_axes(results.axes, results.published).axes) == 1
    assert len(figures.figure_margins(results.margins).axes) == 2
    assert len(figures.figure_partings(results.curves, results.partings, results.written).axes) == 2
    assert len(figures.figure_drift_and_snowball(results.along, results.snowball).axes) == 1 + parted
    for shown in (
        laid_out.axes_shown(results.axes), laid_out.tails_shown(results.axes), laid_out.partings_shown(results.partings),
    ):  # fmt: skip
        assert shown.notna().all(axis=None)
    assert not tables.curves_table(results.curves).empty


@pytest.mark.parametrize(
    ("estimate", "written"),
    [
        (fits.Estimate(1.7e-4, 1.5e-4, 1.9e-4), "(1.7 ± 0.2) × 10⁻⁴"),
        (fits.Estimate(2.0, 1.5, 2.5), "(2.0 ± 0.5)"),
        (fits.Estimate(0, 0, 0), "0"),
        # A range is none that has a half.
        (fits.Estimate(1.7e-4, 1.5e-4, 1.9e-4, "range"), "1.7 [1.5 to 1.9] × 10⁻⁴"),
    ],
)
def test_small_numbers_are_written_with_half_their_interval(estimate, written):
    assert laid_out.spread(estimate) == written


def test_every_figure_begins_with_a_finding_that_a_title_can_hold(results):
    for name, said in words.captions(results).items():
        if name.startswith("fig-"):
            assert not citation.first_sentence(said["caption"]).endswith("…"), name


@pytest.mark.parametrize(("factor", "word"), [(1e-3, ""), (1e3, ""), (1, " (not to be told from 1)")])
def test_the_cache_is_set_beside_the_other_dtype_as_the_interval_lies(forced, factor, word):
    rows = forced.rows.copy()
    kl = np.exp(np.random.default_rng(3).normal(0, 1, len(rows)))
    rows["kl"] = np.where(rows["way"] == words.CACHE, factor * kl, kl)
    said = words._axes_found(rows)
    assert said.count("times as far") == len(SIZE)
    assert said.count("times as far (not to be told from 1)") == (len(SIZE) if word else 0)


def test_lost_choices_are_counted_with_the_largest_margin_lost_and_none_is_not_called_some(forced):
    kept = forced.rows.assign(flip=0.0)
    assert "no first choice is seen to be lost" in words._margins_found(kept)
    lost = kept.copy()
    at = lost[(lost["dtype"] == "bfloat16") & (lost["way"] == words.CACHE)].index[0]
    lost.loc[at, ["flip", "margin"]] = 1.0, 5 * lost.loc[at, "ulp"]
    counts = "0 of 720 times in fp32 and 1 of 720 times in bf16, "
    assert f"{counts}all at margins of at most 5 ulps." in words._margins_found(lost)
    assert f"{counts}all at exact ties." in words._margins_found(lost.assign(margin=0.0))
    tied = kept[(kept["dtype"] == "bfloat16") & (kept["way"] == words.CACHE)].index[1]
    lost.loc[tied, ["flip", "margin"]] = 1.0, 0.0
    assert "all at margins of at most 5 ulps (1 exact tie)." in words._margins_found(lost)
    # A way that does more than round has no say.
    other = kept.assign(flip=(kept["way"] == variants.LOST.name).astype(float))
    assert "no first choice is seen to be lost" in words._margins_found(other)


def test_partings_are_counted_by_choice_and_texts_that_stay_together_are_not_said_to_part(parting):
    assert "greedy 0 of 6 in fp32 and 3 of 6 in bf16, sampled 0 of 6 in fp32" in words._partings_found(parting.rows)
    assert "none of 24 texts" in words._partings_found(parting.rows.assign(parted=0))


def test_growth_is_called_less_than_the_positions_only_where_its_interval_is(results):
    level = results.positions.rows.assign(kl=1e-3)
    said = words._drift_found(changed(results, positions=level))
    assert "changes 1.00-fold in fp32 and bf16, less than the position's 5.6-fold" in said
    assert f"({drift_by_position.CHUNKS.name})" in said
    assert "not everywhere less" in words._drift_found(results)
    assert "No growth" in words._drift_found(changed(results, positions=level.assign(kl=0.0)))
