import numpy as np
import pandas as pd
import pytest

from kvbook.measuring import estimates as fits


def series(growth: float, noise: float, n_files: int = 20, seed: int = 0) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    return pd.DataFrame(
        [
            {"sample": s, "source": f"file{s % n_files}", "layer": layer,
             "max_abs": (1 + growth) ** layer * np.exp(noise * generator.standard_normal())}
            for s in range(60)
            for layer in range(2, 12)
        ]
    )  # fmt: skip


def test_growth_of_an_exact_law_is_found_exactly():
    layers = np.arange(2, 12)
    found = fits.growth_per_layer(layers, 3e-5 * 1.1**layers)
    assert found.value == pytest.approx(0.1)
    assert found.high - found.low < 1e-9


def test_the_bootstrap_interval_covers_the_true_growth_and_narrows_without_noise():
    noisy = fits.growth_resampled(fits.resample(series(0.1, 0.5), "max_abs"))
    quiet = fits.growth_resampled(fits.resample(series(0.1, 0.01), "max_abs"))
    assert noisy.low < 0.1 < noisy.high
    assert quiet.high - quiet.low < (noisy.high - noisy.low) / 10


def test_a_law_without_growth_is_not_called_growing():
    flat = fits.growth_resampled(fits.resample(series(0.0, 0.3), "max_abs"))
    assert flat.low < 0 < flat.high


def test_geometric_mean_ratio_equals_what_one_computes_by_hand():
    found = fits.geometric_mean_ratio(np.array([2.0, 8.0]), np.array([1.0, 1.0]))
    assert found.value == pytest.approx(4.0)
    assert found.low < 4 < found.high


def test_resampling_keeps_a_files_samples_together():
    rows = series(0.1, 0.5, n_files=1)
    assert np.ptp(fits.resample(rows, "max_abs").draws, axis=0).max() == pytest.approx(0)
    assert np.ptp(fits.resample(series(0.1, 0.5, n_files=60), "max_abs").draws, axis=0).min() > 0


def test_the_resampled_mean_is_the_mean():
    rows = series(0.1, 0.5)
    expected = rows.groupby("layer")["max_abs"].mean().to_numpy()
    assert fits.resample(rows, "max_abs").mean == pytest.approx(expected)


def test_ratios_of_a_series_to_its_multiple_have_no_spread():
    rows = series(0.1, 0.5)
    eightfold = rows.assign(max_abs=8 * rows["max_abs"])
    found = fits.ratio_resampled(fits.resample(eightfold, "max_abs"), fits.resample(rows, "max_abs"))
    assert (found.value, found.low, found.high) == pytest.approx((8, 8, 8))


def variants() -> pd.DataFrame:
    generator = np.random.default_rng(0)
    base = generator.lognormal(size=40)
    return pd.DataFrame(
        [
            {"sample": i, "source": f"f{i}", "variant": name, "value": factor * x}
            for i, x in enumerate(base)
            for name, factor in (("stock", 1.0), ("half", 0.5))
        ]
    )


def test_paired_ratios_cancel_what_the_samples_share():
    for estimate in (
        fits.paired_ratio(variants(), "value", "half", "stock"),
        fits.paired_median_ratio(variants(), "value", "half", "stock"),
    ):
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_share_of_nothing_still_has_an_upper_end():
    found = fits.share(0, 50)
    assert found.value == 0
    assert 0.05 < found.high < 0.10


def test_an_estimate_is_written_with_its_interval():
    assert fits.Estimate(1.234, 1.0, 1.5).text("{:.1f}") == "1.2 [1.0, 1.5]"
