"""The chapter's statistics are those that their names say, and its statements fail on rows that contradict them."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from planted import run_of, with_rows, with_runs

from kvbook.measuring import estimates as fits
from kvreport.chapters.does_it_matter import figures, measures, tables
from kvreport.chapters.does_it_matter import rows as named
from kvreport.publishing import found as found_in
from kvreport.publishing import statements, wording

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
            for way, kind in named.KINDS.items():
                size = rounding if kind == "rounding" else 0.3
                shifts = generator.normal(0, size, 20)
                rows += [
                    {
                        "dtype": dtype, "way": way, "sample": sample, "source": f"{sample}.py", "position": 20 + k,
                        "nll": nll[k], "dlogp": generator.normal(0, size), "kl": shifts[k] ** 2 / 4,
                        "flip": float(shifts[k] < -margins[k]), "margin": margins[k], "shift": shifts[k],
                        "ulp": 2.0**-20 if dtype == "float32" else 2.0**-4, "decision_flip": 0, "decision_right": 1,
                    }
                    for k in range(20)
                ]
    return run(rows)


@pytest.fixture(scope="module")
def axes(results):
    return tables.axes(results)


def test_the_statistics_are_those_that_numpy_gives(forced, axes):
    rows = forced.rows.query("dtype == 'bfloat16' and way == 'KV cache in int4'")
    found = axes.query("dtype == 'bfloat16' and way == 'KV cache in int4'").iloc[0]
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


def test_streams_that_are_equal_differ_in_nothing_and_shares_keep_an_interval(forced, results):
    equal = forced.rows.assign(kl=0.0, dlogp=0.0, shift=0.0, flip=0.0)
    table = tables.axes(with_rows(results, teacher_forced=equal))
    assert all(estimate == fits.Estimate(0, 0, 0) for estimate in table["kl"])
    assert all(estimate == fits.Estimate(1, 1, 1) for estimate in table["perplexity_ratio"])
    assert all(estimate.value == 1 and estimate.low < 1 for estimate in table["same_top"])
    assert (table["bits_equal_share"] == 1).all()


@pytest.mark.parametrize(
    ("files", "kind"), [((0.0, 1.0), "range"), ((0.0, 1.0, 2.0), "range"), ((0.0, 1.0, 2.0, 3.0), "95 %")]
)
def test_the_unit_of_resampling_is_the_file_and_few_files_have_a_range(files, kind):
    # Files that disagree, each with many tokens: the interval is as wide as so few files leave it.
    rows = pd.DataFrame([{"source": str(k), "x": value} for k, value in enumerate(files) for _ in range(50)])
    found = measures.of_all_rows(np.mean, "x")(rows)
    assert (found.kind, found.value) == (kind, np.mean(files))
    assert found.high - found.low > 1 if kind == "95 %" else (found.low, found.high) == (min(files), max(files))


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


def test_margins_hold_every_comparison_that_only_rounds(forced, results):
    table = results["margins"]
    rounding = forced.rows[forced.rows["way"].isin(named.ROUNDING)]
    for dtype, part in rounding.groupby("dtype"):
        own = table[table["dtype"] == dtype]
        assert own["tokens"].sum() == len(part)
        assert own["flips"].sum() == part["flip"].sum()
        assert (own["predicted"].diff().dropna() <= 1e-12).all()
    assert fits.flat(table)["seen"].notna().sum() == (table["tokens"] > 0).sum()


def test_a_loss_that_just_takes_a_margin_leaves_a_tie():
    losses = pd.Series([0.0, 1.0, 1.0, 2.0])
    # A margin of 1: one loss is larger and two leave a tie.  A margin of 0: three losses are larger.
    assert named.overtaken(np.array([1.0]), losses) == pytest.approx(1 / 4 + 2 / 8)
    assert named.overtaken(np.array([0.0]), losses) == pytest.approx(3 / 4)


@pytest.fixture(scope="module")
def parting():
    ways = [named.BASELINE, *(way for way in named.WAYS if way != named.OTHER_DTYPE)]
    return run(
        {
            "dtype": dtype, "choice": choice, "way": way, "sample": sample, "source": f"{sample}.py",
            "steps": 20 if dtype == "float32" else 4 + sample, "parted": int(dtype == "bfloat16" and sample % 2),
            # Of three divergences in bf16 one is at a tie, on either side.
            "tied": float(sample == 1), "tied_baseline": 0.0,
            "path": " ".join(map(str, range(20))) if dtype == "float32" or sample % 2 else "0 1 2 9",
        }
        for dtype in SIZE for choice in named.CHOICES for way in ways for sample in range(6)
        if (choice, way) != (named.SAMPLED, named.ASSISTED)
    )


@pytest.fixture(scope="module")
def positions():
    return run(
        {
            "dtype": dtype, "way": way, "sample": sample, "source": f"{sample}.py", "bin": place,
            "read_from": 4 * place, "read_to": 4 * place + 4, "n_tokens": 4, "kl": SIZE[dtype] * place, "flips": 0,
        }
        for dtype in SIZE for way in ("cache, 64 tokens at once", "KV cache in int8") for sample in range(2)
        for place in range(1, 16)
    )


@pytest.fixture(scope="module")
def behind():
    return run(
        {
            "dtype": "bfloat16", "sample": sample, "source": f"{sample}.py", "offset": offset, "kl_forced": 1e-4,
            "kl_free": 2.0 if offset > 0 else 1e-4, "token_equal": int(offset < 0),
        }
        for sample in range(2) for offset in range(-3, 5)
    )


def found_of(*runs):
    return found_in.of_runs("does_it_matter", dict(zip(named.EXPERIMENTS, runs, strict=True)))


@pytest.fixture(scope="module")
def results(forced, positions, parting, behind):
    return found_of(forced, positions, parting, behind)


def test_growth_of_what_grows_in_proportion_is_the_ratio_of_the_places(positions, results):
    growth = measures.OVER_THE_FIRST_QUARTER.where(place=named.LAST)
    # Bins 1 to 3 against 12 to 15.
    assert [one.estimate.value for one in growth(results)] == pytest.approx([13.5 / 2] * 4)
    level = with_rows(results, drift_by_position=positions.rows.assign(kl=1e-3))
    assert [one.estimate.value for one in growth(level)] == pytest.approx([1] * 4)


def test_a_divergence_counts_as_tied_where_either_side_is(parting, results):
    swapped = parting.rows.assign(tied=parting.rows["tied_baseline"], tied_baseline=parting.rows["tied"])
    for given in (results, with_rows(results, first_divergence=swapped)):
        cached = tables.partings(given).query("change == @named.CACHED").set_index("dtype")
        assert dict(cached["at a tie"]) == {"fp32": "0 of 0", "bf16": "1 of 3"}


def test_the_other_dtype_is_compared_by_the_two_uncached_texts(parting, results):
    curve = results["curves"].query("dtype == 'bfloat16' and choice == 'greedy' and way == @named.OTHER_DTYPE")
    # Three of six texts, those of even samples, differ at their fourth token.
    assert list(zip(curve["step"], curve["share"], strict=True))[:2] == [(0, 1), (4, 0.5)]
    # Control: of a single dtype there is nothing to compare.
    alone = with_rows(results, first_divergence=parting.rows[parting.rows["dtype"] == "bfloat16"])
    assert named.OTHER_DTYPE not in set(alone["texts"]["way"])


def test_a_text_that_ended_early_and_never_diverged_counts_to_the_end(results):
    # In bf16 half of the texts diverged, and the others ended before some of these did.
    found = measures.EQUAL_AT_THE_END.where(choice=named.GREEDY, way=named.CACHED).table(results)
    assert [one.value for one in found.set_index("dtype")["estimate"][list(SIZE)]] == pytest.approx([1, 0.5])


def test_a_change_is_written_with_its_interval_or_its_range():
    assert wording.change(fits.Estimate(1.001, 0.999, 1.003, "range")) == "+0.10 [-0.10 to +0.30]"
    assert wording.change(fits.Estimate(1.001, 0.999, 1.003)) == "+0.10 ± 0.20"


@pytest.mark.parametrize("parted", [True, False])
def test_figures_and_tables_are_made_of_the_rows(results, axes, parted):
    results = results if parted else with_runs(results, after_divergence=None)
    figures.figure_margins(results["margins"])
    figures.figure_partings(results["curves"], 30)
    figures.figure_axes(axes.assign(kl=[fits.Estimate(0, 0, 0), *axes["kl"][1:]]), book=axes)
    assert len(figures.figure_drift_and_snowball(tables.along(results), tables.snowball(results)).axes) == 1 + parted
    for shown in (tables.axes_grid(axes), tables.tails_grid(axes), tables.partings(results)):
        assert shown.notna().all(axis=None)


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
    assert wording.spread(estimate) == written


# Statements


KL = {
    named.OTHER_DTYPE: 1e-3, named.KV_FP8: 5e-3, named.KV_INT8: 2e-3, named.KV_INT4: 0.1, named.WEIGHTS_8: 0.02,
    named.WEIGHTS_4: 0.4, named.FAULT: 0.17,
}


@pytest.fixture(scope="module")
def lawful(forced, positions, parting, behind):
    """Rows that bear out every statement, of enough files and prompts."""
    rows = pd.concat([forced.rows.assign(source=lambda r, k=k: r["source"] + str(k)) for k in range(6)])
    rows["sample"] = rows.groupby("source", sort=False).ngroup()
    rounding = rows["dtype"].map({"float32": 1e-11, "bfloat16": 1.5e-3})
    by_way = rows["way"].map(KL).fillna(rounding)
    by_way = by_way.mask((rows["way"] == named.BATCHED) & (rows["dtype"] == "float32"), 0)
    rows = rows.assign(kl=by_way * np.random.default_rng(1).uniform(0.8, 1.2, len(rows)), flip=0.0)
    rows["dlogp"] *= 1e-3
    first = rows[(rows["dtype"] == "bfloat16") & (rows["way"] == named.CACHED)].index[0]
    rows.loc[first, ["flip", "margin"]] = 1.0, 0.0
    prompts = pd.concat([parting.rows.assign(sample=lambda r, k=k: 6 * k + r["sample"]) for k in range(8)])
    prompts = prompts.assign(
        steps=20, parted=((prompts["dtype"] == "bfloat16") & (prompts["sample"] % 5 > 0)).astype(int)
    )
    texts = pd.concat([behind.rows.assign(source=f"{k}.py", sample=k) for k in range(6)])
    level = pd.concat([positions.rows.assign(source=lambda r, k=k: r["source"] + str(k), kl=1e-3) for k in range(6)])
    return found_of(run(rows), run(level), run(prompts), run(texts))


def outcome(results, name):
    # Whatever processor it speaks of: made rows are of none.
    return statements.check(dataclasses.replace(measures.STATEMENTS[name], on=""), results).outcome


def changed(results, where, values, experiment="teacher_forced"):
    """Return results with other values in some rows of a run."""
    rows = results[experiment].copy()
    rows.loc[where(rows), list(values)] = list(values.values())
    return with_rows(results, **{experiment: rows})


def of(way, dtype=None):
    return lambda rows: (rows["way"] == way) & (rows["dtype"] == dtype if dtype else True)


# The rows that are changed, and to what; and the run, where it is not that of `teacher_forced`.
CONTRARY = {
    "perplexity-stays": (of(named.CACHED), {"dlogp": -0.05}),
    "bf16-as-the-dtype": (of(named.CACHED, "bfloat16"), {"kl": 0.01}),
    "fp32-far-below-the-dtype": (of(named.CACHED, "float32"), {"kl": 1e-3}),
    "few-bits-move-further": (of(named.WEIGHTS_8), {"kl": 1e-3}),
    "rounded-moves-further": (of(named.KV_INT8), {"kl": 1e-4}),
    "fp8-moves-further": (of(named.KV_FP8), {"kl": 1e-3}),
    "fp8-further-than-int8": (of(named.KV_FP8), {"kl": 1e-3}),
    "int8-as-the-cache": (of(named.KV_INT8), {"kl": 0.1}),
    "static-moves-as-far": (of(named.STATIC), {"kl": 1.0}),
    "static-moves-less-on-amd": (of(named.STATIC), {"kl": 1.0}),
    "a-batch-changes-nothing-on-amd": (of(named.BATCHED, "bfloat16"), {"kl": 1e-3}),
    "a-batch-changes-nothing": (of(named.BATCHED, "float32"), {"kl": 1e-12}),
    "a-batch-changes-all-in-bf16": (of(named.BATCHED, "bfloat16"), {"kl": 0.0}),
    "rounding-shrinks": (of(named.CACHED, "float32"), {"kl": 1e-3}),
    "a-fault-stays": (of(named.FAULT, "float32"), {"kl": 1e-9}),
    "a-fault-looks-like-few-bits": (of(named.WEIGHTS_4), {"kl": 1e-3}),
    "flips-at-small-margins": (of(named.CACHED, "bfloat16"), {"flip": 1.0, "margin": 9.0}),
    "fp32-expects-no-flip": (of(named.CACHED, "float32"), {"shift": -1.0}),
    "bf16-texts-diverge": (of(named.CACHED, "bfloat16"), {"parted": 0}, "first_divergence"),
    "fp32-texts-stay": (of(named.CACHED, "float32"), {"parted": 1, "steps": 3}, "first_divergence"),
    "sampled-texts-diverge": (of(named.CACHED, "bfloat16"), {"parted": 0}, "first_divergence"),
    "assisted-texts-diverge": (of(named.ASSISTED, "bfloat16"), {"parted": 0}, "first_divergence"),
    "length-adds-little": (lambda rows: rows["bin"] > 10, {"kl": 1.0}, "drift_by_position"),
    "texts-go-their-own-way": (lambda rows: rows["offset"] > 0, {"kl_free": 1e-3}, "after_divergence"),
}


# What holds on one processor where its contrary holds on another.
ELSEWHERE = {
    "static-moves-less-on-amd": (of(named.STATIC), {"kl": 1e-15}),
    "a-batch-changes-nothing-on-amd": (of(named.BATCHED, "bfloat16"), {"kl": 0.0}),
}


@pytest.mark.parametrize("name", measures.STATEMENTS)
def test_a_statement_holds_on_rows_that_follow_it_and_fails_on_those_that_do_not(lawful, name):
    if name in ELSEWHERE:
        assert outcome(lawful, name) == "fails"
        lawful = changed(lawful, *ELSEWHERE[name])
    assert outcome(lawful, name) == "holds"
    # Texts that all diverge at once have no interval.
    assert outcome(changed(lawful, *CONTRARY[name]), name) in ("fails", "not resolved")
