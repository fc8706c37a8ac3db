"""Estimates with their intervals: growth, ratios and shares."""

import inspect

import numpy as np
import pandas as pd
import pytest

from kvbook.measuring import estimates as fits


def series(growth: float, noise: float, n_files: int = 20) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    return pd.DataFrame([
        {"sample": s, "source": f"file{s % n_files}", "layer": layer,
         "max_abs": (1 + growth) ** layer * np.exp(noise * generator.standard_normal())}
        for s in range(60) for layer in range(2, 12)
    ])


def resampled(*of, **options):
    return fits.resample(series(*of, **options), "max_abs")


def test_an_estimate_is_written_with_its_interval_or_range_and_rounded_to_two_digits_with_its_ends():
    assert fits.Estimate(14_191, 13_426, 14_911).in_two_digits().text("{:,.0f}") == "14,000 [13,000, 15,000]"
    assert fits.Estimate(0.0, 0.0374, 75.6, "range").in_two_digits() == fits.Estimate(0.0, 0.037, 76.0, "range")
    assert fits.Estimate(1.234, 1.0, 1.5, "range").text("{:.1f}") == "1.2 [1.0 to 1.5]"
    assert fits.Estimate(251.0, 13.4, 1_400_000, "range").text("{:.2g}") == "250 [13 to 1.4e+06]"
    flat = fits.flat(pd.DataFrame({"x": [fits.Estimate(1, 0, 2), fits.Estimate(1, 1, 1, "range"), None]}))
    assert flat.columns.tolist() == ["x", "x_low", "x_high", "x_kind"]
    assert flat["x_kind"].dropna().tolist() == ["95 %", "range"]


def test_growth_of_an_exact_law_is_found_exactly():
    layers = np.arange(2, 12)
    found = fits.growth_per_layer(layers, 3e-5 * 1.1**layers)
    assert found.value == pytest.approx(0.1)
    assert found.high - found.low < 1e-9


def test_the_bootstrap_interval_covers_the_true_growth_and_narrows_without_noise():
    noisy, quiet, flat = (fits.growth_resampled(resampled(*of)) for of in ((0.1, 0.5), (0.1, 0.01), (0.0, 0.3)))
    assert noisy.low < 0.1 < noisy.high
    assert quiet.high - quiet.low < (noisy.high - noisy.low) / 10
    assert flat.low < 0 < flat.high, "a law without growth is not called growing"


def test_resampling_keeps_a_files_samples_together_and_its_mean_is_the_mean():
    assert np.ptp(resampled(0.1, 0.5, n_files=1).draws, axis=0).max() == pytest.approx(0)
    assert np.ptp(resampled(0.1, 0.5, n_files=60).draws, axis=0).min() > 0
    expected = series(0.1, 0.5).groupby("layer")["max_abs"].mean().to_numpy()
    assert resampled(0.1, 0.5).mean == pytest.approx(expected)


def test_ratios_are_what_one_computes_by_hand_and_cancel_what_the_samples_share():
    by_hand = fits.geometric_mean_ratio(np.array([2.0, 8.0]), np.array([1.0, 1.0]))
    assert by_hand.value == pytest.approx(4.0)
    assert by_hand.low < 4 < by_hand.high
    base = np.random.default_rng(0).lognormal(size=40)
    rows = pd.DataFrame(
        [{"sample": i, "source": f"f{i}", "variant": name, "layer": 0, "value": factor * x}
         for i, x in enumerate(base) for name, factor in (("stock", 1.0), ("half", 0.5))]
    )
    of = {name: fits.resample(rows[rows["variant"] == name], "value") for name in ("half", "stock")}
    for estimate in (
        fits.paired_ratio(rows, "value", "half", "stock"), fits.paired_median_ratio(rows, "value", "half", "stock"),
        fits.ratio_resampled(of["half"], of["stock"]),
    ):
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.5, 0.5, 0.5))


def tokens(n_files: int, per_file: int, hits: int) -> pd.DataFrame:
    """Return rows of several tokens a file, the first so many of each of which hold."""
    return pd.DataFrame(
        [{"source": f"f{f}", "sample": f, "holds": place < hits} for f in range(n_files) for place in range(per_file)]
    )


@pytest.mark.parametrize("share", [fits.share_of_rows, fits.share_over])
def test_a_share_counts_files_and_not_their_rows(share):
    for rows in (tokens(50, 1, 0), many := tokens(50, 200, 0)):
        found = share(rows, rows["holds"])[0]
        assert (found.value, found.low, found.kind) == (0, 0, "95 %")
        assert 0.05 < found.high < 0.10
    # Control: as many rows in as many files of their own tell more.
    assert share(many.assign(source=range(len(many))), many["holds"])[0].high < 0.001


def test_a_share_is_that_of_the_texts_and_its_interval_counts_files():
    # Of one file nine texts, of nine others one each.
    rows = pd.concat([tokens(1, 9, 9), tokens(9, 1, 0).assign(source=lambda r: r["source"] + "b")], ignore_index=True)
    assert fits.share_over(rows.assign(sample=range(18)), rows["holds"]) == (fits.wilson(0.5, 10), 10)


def test_a_share_of_a_texts_rows_has_the_interval_of_the_texts_shares_and_not_of_so_many_trials():
    shares = np.linspace(0.024, 0.062, 33)
    found, files = fits.share_of_rows(pd.DataFrame({"source": range(33)}), pd.Series(shares))
    assert (found.value, files) == (pytest.approx(shares.mean()), 33)
    # Twice the standard error of their mean to either side.
    assert found.high - found.low == pytest.approx(4 * shares.std() / 33**0.5, rel=0.1)
    # Control: as trials they would scatter nearly four times as far as the shares themselves do.
    assert fits.wilson(shares.mean(), 33).high > 2 * shares.max()


@pytest.mark.parametrize(("n_files", "change", "true", "missed", "plain"), [
    (4, np.asarray, 0, 0.125, 0.19), (8, np.asarray, 0, 0.06, 0.12), (30, np.asarray, 0, 0.05, 0.065),
    (8, np.exp, np.exp(0.5), 0.15, 0.21),
])
def test_intervals_of_eight_files_miss_as_often_as_they_should_but_for_skewed_values(
    n_files, change, true, missed, plain
):
    values = change(np.random.default_rng(0).normal(size=(n_files, 1000)))
    rows = pd.DataFrame(values).melt(var_name="layer", ignore_index=False).rename_axis("source").reset_index()
    found = fits.resample(rows.assign(sample=rows["source"]), "value")
    # Control: the middle 95 % of the draws.
    for (low, high), share in ((found.interval(), missed), (np.quantile(found.draws, [0.025, 0.975], axis=0), plain)):
        assert ((low > true) | (high < true)).mean() == pytest.approx(share, abs=0.02)


def test_what_is_no_trial_is_refused_and_several_rows_of_a_text_are_no_trials():
    rows = tokens(40, 20, 1)
    with pytest.raises(ValueError, match="hold or not"):
        fits.share_over(rows, rows["holds"] / 2)
    assert fits.share_over(rows, rows["holds"]) == fits.share_of_rows(rows, rows["holds"])
    # Control: with one row a text they are trials.
    assert fits.share_over(rows[::20], rows[::20]["holds"])[0] == fits.wilson(1.0, 40)


def of_files(n_files: int) -> pd.DataFrame:
    """Return forty rows of two variants in so many files; file f is f + 1 times as large."""
    return pd.DataFrame([
        {"sample": i, "source": f"f{i % n_files}", "variant": name, "layer": layer,
         "value": (1 + i % n_files) * factor * layer}
        for i in range(40) for layer in (2, 3, 4) for name, factor in (("stock", 1.0), ("half", 0.5 + i % n_files))
    ])


ESTIMATES = {
    "mean_resampled": lambda rows: fits.mean_resampled(rows, "value"),
    "log_mean_resampled": lambda rows: fits.log_mean_resampled(rows, "value"),
    "paired_ratio": lambda rows: fits.paired_ratio(rows, "value", "half", "stock"),
    "paired_median_ratio": lambda rows: fits.paired_median_ratio(rows, "value", "half", "stock"),
    "growth_resampled": lambda rows: fits.growth_resampled(fits.resample(rows, "value")),
    "ratio_resampled": lambda rows: fits.ratio_resampled(
        *(fits.resample(rows[rows["variant"] == name], "value") for name in ("half", "stock"))
    ),
    "share_over": lambda rows: fits.share_over(rows, rows["value"] > 4)[0],
    "share_of_rows": lambda rows: fits.share_of_rows(rows, rows["value"] > 4)[0],
    "of_units": lambda rows: fits.of_units(np.mean, [of.to_numpy() for _, of in rows.groupby("source")["value"]], 200),
    "median_of": lambda rows: fits.median_of(rows.groupby("source")["value"].mean().to_numpy()),
}
# Of one fit, of published numbers, or what estimates are made of.
OTHERS = """by_sample flat geometric_mean_ratio growth_per_layer mean_of percentiles resample slopes students two_digits
wilson written"""


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("n_files", [1, 3, 4, 20])
def test_forty_rows_of_fewer_than_four_files_have_a_range_and_no_interval(name, n_files):
    found = ESTIMATES[name](of_files(n_files))
    assert found.kind == ("range" if n_files < fits.FEWEST_UNITS else "95 %")
    assert found.low <= found.value <= found.high
    if n_files == 1:
        assert found.low == pytest.approx(found.high)


def test_no_estimate_over_samples_is_without_this_check():
    functions = inspect.getmembers(fits, lambda one: inspect.isfunction(one) and one.__module__ == fits.__name__)
    assert {name for name, _ in functions if not name.startswith("_")} - set(OTHERS.split()) == set(ESTIMATES)


def test_the_range_of_a_few_files_is_that_of_each_of_them():
    found = fits.mean_resampled(of_files(3).query("variant == 'stock' and layer == 2"), "value")
    assert (found.low, found.high) == (2.0, 6.0)
