"""The judge of bug or rounding: right on every planted bug and on every clean family."""

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack, nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from kvbook import paths
from kvbook.diagnosis import check, faults, outcome, probe, tokenizer_boundary, verdict
from kvbook.diagnosis.rows import rows_of, suspicious_layer
from kvbook.diagnosis.settings import CheckSettings
from kvbook.errors import UserError
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvbook.models import corpus, loading, placement, tokenizers

DTYPES = tuple(UNIT_ROUNDOFF)
CAUSAL = ("gpt2", "llama", "qwen2", "smollm2", "mpt", "falcon")
CLEAN = "clean"
WAYS = (probe.SPLIT, *probe.WAYS)
TEXT = "def f(x):\n    return x + 1\n# What is it? Help.\n"


# Families and faults: every combination is measured once, in every dtype.


@pytest.fixture(scope="module")
def measured(family_folders) -> pd.DataFrame:
    rows = []
    for family in CAUSAL:
        for dtype in DTYPES:
            loaded = loading.load(str(family_folders[family]), dtype=dtype)
            ids = loaded.tokenizer(TEXT)["input_ids"][:24]
            planted = {name: fault.plant for name, fault in faults.FAULTS.items() if fault.applies(loaded.model.config)}
            for name, plant in {CLEAN: nullcontext, faults.SEAM: nullcontext, **planted}.items():
                whole, fed = (
                    faults.seam(loaded.tokenizer, ids) if name == faults.SEAM else (ids, ids)
                )  # every vocabulary has a seam
                with plant(loaded.model) if name in planted else nullcontext():
                    for reading in probe.readings(
                        loaded.model, torch.tensor([whole]), torch.tensor([fed]), np.random.default_rng(0), WAYS
                    ):
                        rows.append(
                            {"family": family, "fault": name, "dtype": dtype, "source": "text", "sample": 0}
                            | vars(reading)
                        )
    return pd.DataFrame(rows)


def kinds(rows: pd.DataFrame) -> dict[tuple, str]:
    return {key: verdict.judge(part).kind for key, part in rows.groupby(["family", "fault", "way"])}


def test_every_planted_bug_is_called_a_bug_in_every_family_and_way(measured):
    found = kinds(measured[measured["fault"] != CLEAN])
    assert {key: kind for key, kind in found.items() if kind != "bug"} == {}
    assert len(found) == len(WAYS) * (len(CAUSAL) * (len(faults.FAULTS) + 1) - 2)


def test_no_clean_family_is_called_a_bug_in_all_dtypes_or_in_any(measured):
    clean = measured[measured["fault"] == CLEAN]
    assert set(kinds(clean).values()) <= {"rounding", "exact"}
    for dtype in DTYPES:
        assert "bug" not in kinds(clean[clean["dtype"] == dtype]).values()
    without = clean[clean["dtype"] != "float64"]
    assert set(kinds(without).values()) <= {"rounding", "exact"}


def test_a_bug_is_found_without_fp64_unless_16_bits_hide_it(measured):
    coarse = measured[(measured["dtype"] != "float64") & ~measured["fault"].isin([CLEAN, "cache kept in 16 bits"])]
    assert set(kinds(coarse).values()) == {"bug"}


def test_a_bug_that_16_bits_hide_is_found_in_finer_arithmetic_and_not_in_16_bits(measured):
    hidden = measured[measured["fault"] == "cache kept in 16 bits"]
    assert set(kinds(hidden).values()) == {"bug"}
    # Without fp64 fp32 is too fine to pass it off as rounding, if it is not too coarse to be sure.
    assert set(kinds(hidden[hidden["dtype"] != "float64"]).values()) <= {"bug", "undecided"}
    # Control: where only 16 bits are looked at, it is not there to be seen.
    assert "bug" not in kinds(hidden[hidden["dtype"].isin(["float16", "bfloat16"])]).values()


def test_positions_are_not_counted_where_there_is_alibi(measured):
    assert not measured[(measured["family"] == "mpt") & measured["fault"].str.startswith("position")].size
    assert measured[(measured["family"] == "falcon") & measured["fault"].str.startswith("position")].size


def test_without_a_cache_the_logits_are_those_of_the_last_part_alone(measured):
    lost = measured["fault"] == "cache never returned"
    assert (measured.loc[lost, "held"] == 0).all()
    assert measured.loc[lost, "alone"].all()
    assert not measured.loc[measured["fault"] == CLEAN, "alone"].any()
    clean = measured[measured["fault"] == CLEAN]
    assert (clean["held"] == clean["fed"]).all()


def test_control_softmax_in_32_bits_would_make_a_sound_mpt_look_like_a_bug(family_folders, monkeypatch):
    loaded = loading.load(str(family_folders["mpt"]), dtype="float64")
    sample = corpus.Sample(0, "text", 0, loaded.tokenizer(TEXT)["input_ids"])
    wide = pd.DataFrame(rows_of(loaded.model, "float64", [sample]))
    monkeypatch.setattr(probe, "widened", lambda dtype: nullcontext())
    stock = pd.DataFrame(rows_of(loaded.model, "float64", [sample]))
    assert verdict.judge(wide).kind == "rounding"
    assert verdict.judge(stock).kind == "bug"


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_is_taken_out_again_also_after_an_error(name, family_folders):
    model = loading.load(str(family_folders["llama"])).model
    ids = torch.arange(11, 31)[None]

    def last() -> torch.Tensor:
        with torch.inference_mode():
            return probe.cached(model, ids, [15, 5])[0].logits

    before = last()
    with faults.FAULTS[name].plant(model):
        assert not torch.equal(last(), before)
    with pytest.raises(KeyboardInterrupt), faults.FAULTS[name].plant(model):
        raise KeyboardInterrupt
    assert torch.equal(last(), before)


@pytest.mark.parametrize("plant", [faults.one_step_late, faults.kept_in_16_bits])
@pytest.mark.parametrize("layer", [0, 3])
def test_the_first_suspicious_layer_is_the_one_in_which_the_bug_is(llama_folder, plant, layer):
    model = loading.load(str(llama_folder), dtype="float64").model
    sample = corpus.Sample(0, "text", 0, list(range(11, 31)))
    with plant(model, layers={layer}):
        rows = pd.DataFrame(rows_of(model, "float64", [sample]))
    assert suspicious_layer(rows) == layer + 1


def test_positions_that_are_added_to_the_embedding_are_suspicious_there(gpt2_folder):
    model = loading.load(str(gpt2_folder), dtype="float64").model
    with faults.offset_forgotten(model):
        rows = pd.DataFrame(rows_of(model, "float64", [corpus.Sample(0, "text", 0, list(range(11, 31)))]))
    assert suspicious_layer(rows) == 0


def test_a_fault_behind_the_last_layer_is_in_no_layer(llama_folder):
    model = loading.load(str(llama_folder), dtype="float64").model

    def rows() -> pd.DataFrame:
        return pd.DataFrame(rows_of(model, "float64", [corpus.Sample(0, "text", 0, list(range(11, 31)))]))

    clean = rows()
    head = model.lm_head.forward
    model.lm_head.forward = lambda states: head(states) * (1 if states.shape[1] > 10 else 1 + torch.arange(320) / 320)
    assert verdict.judge(rows()).kind == "bug"
    assert suspicious_layer(rows()) is None
    # Control: rounding is somewhere before the head.
    assert suspicious_layer(clean) is not None


def test_a_text_without_a_seam_has_none(bpe, family_folders):
    tokenizer = loading.tokenizer(str(family_folders["gpt2"]))
    assert faults.seam(tokenizer, tokenizer(TEXT)["input_ids"]) is not None
    assert faults.seam(tokenizer, tokenizer("7 7")["input_ids"]) is None


# The verdict, on rows whose answer is known.


def law(constant: float = 8.0, floor: float = 0.0, dtypes=DTYPES, scatter: float = 0.3, n: int = 12) -> pd.DataFrame:
    generator = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "dtype": dtype,
            "source": f"file {sample // 2}",
            "sample": sample,
            "drift": floor + constant * UNIT_ROUNDOFF[dtype] * np.exp(scatter * generator.standard_normal()),
        }
        for dtype in dtypes
        for sample in range(n)
    )


def test_what_is_proportional_to_the_roundoff_is_rounding_and_what_is_flat_is_a_bug():
    rounding, bug = verdict.judge(law()), verdict.judge(law(floor=0.1))
    assert rounding.kind == "rounding"
    assert rounding.slope.low < 1 < rounding.slope.high
    assert bug.kind == "bug"
    assert bug.slope.low < 0 < bug.slope.high
    assert verdict.slope(law(scatter=0)).value == pytest.approx(1)


@pytest.mark.parametrize("floor", [1e-4, 1e-7, 1e-10])
def test_a_flat_difference_is_a_bug_however_small_if_fp64_sees_it(floor):
    assert verdict.judge(law(floor=floor)).kind == "bug"


def test_control_below_what_fp64_resolves_a_difference_is_taken_for_rounding():
    assert verdict.judge(law(floor=1e-15)).kind == "rounding"


def given(**drifts: float) -> pd.DataFrame:
    """Give every text the same drift: four texts from two files."""
    return pd.DataFrame(
        {"dtype": dtype, "source": f"file {sample // 2}", "sample": sample, "drift": drift}
        for dtype, drift in drifts.items()
        for sample in range(4)
    )


# Seen on one processor: 16 bits make nearly all logits equal, so that drift there is far below its roundoff.
FAR_BELOW_A_ROUNDOFF = {
    "mpt": {"float64": 1.1e-15, "float32": 5.8e-7, "float16": 3.0e-7, "bfloat16": 0.0},
    "qwen2": {"float64": 1.1e-15, "float32": 5.8e-7, "float16": 3.7e-8, "bfloat16": 0.0},
    "gpt-oss": {"float32": 10 * 2.0**-24, "float16": 0.028 * 2.0**-11, "bfloat16": 0.0},
}


@pytest.mark.parametrize("drifts", FAR_BELOW_A_ROUNDOFF.values(), ids=FAR_BELOW_A_ROUNDOFF)
def test_a_drift_far_below_its_own_roundoff_is_no_evidence_against_rounding(drifts):
    found = verdict.judge(given(**drifts))
    assert found.kind == "rounding"
    # It is not the size in the finest dtype alone that says so.
    assert found.slope.low > verdict.BOUNDARY


@pytest.mark.parametrize("drifts", FAR_BELOW_A_ROUNDOFF.values(), ids=FAR_BELOW_A_ROUNDOFF)
@pytest.mark.parametrize("bug", [2e-4, 1e-3, 0.1])
def test_control_a_bug_in_fine_arithmetic_stays_one_where_16_bits_are_as_good_as_equal(drifts, bug):
    found = verdict.judge(
        given(**{d: max(drift, bug) if d in ("float64", "float32") else drift for d, drift in drifts.items()})
    )
    assert found.kind == "bug"


@pytest.mark.parametrize("constants", [(10, 0.01, 30), (10, 30, 0), (80, 0, 0), (0.1, 0, 40), (1, 50, 0.2)])
def test_a_clean_model_is_decided_without_fp64_whatever_16_bits_make_of_it(constants):
    coarse = ("float32", "float16", "bfloat16")
    drifts = {dtype: times * UNIT_ROUNDOFF[dtype] for dtype, times in zip(coarse, constants, strict=True)}
    assert verdict.judge(given(**drifts)).kind == "rounding"


@pytest.mark.parametrize("constants", [(10, 10, 0.01, 30), (300, 5, 0, 0), (20_000, 1, 0, 100), (2, 0, 40, 0)])
def test_where_fp64_stays_within_its_roundoffs_the_other_dtypes_change_nothing(constants):
    drifts = {dtype: times * UNIT_ROUNDOFF[dtype] for dtype, times in zip(DTYPES, constants, strict=True)}
    assert verdict.judge(given(**drifts)).kind == "rounding"
    # Control: beyond its roundoffs they cannot acquit.
    assert verdict.judge(given(**drifts | {"float64": 1e-11})).kind == "bug"


def test_in_fp32_the_size_decides_only_up_to_half_way_to_16_bits():
    edge = verdict.ROUNDING["float32"] * 2.0**-24
    assert verdict.judge(given(float32=0.99 * edge)).kind == "rounding"
    assert verdict.judge(given(float32=1.01 * edge)).kind == "undecided"
    # One text of four beyond the edge is enough to ask the slope.
    rows = given(float32=0.5 * edge)
    rows.loc[0, "drift"] = 2 * edge
    assert verdict.judge(rows).kind == "undecided"


def test_the_slope_takes_what_is_below_a_roundoff_for_a_roundoff_and_needs_something_that_could_fall():
    below, at = (verdict.slope(given(float32=1e-6, float16=drift, bfloat16=0.1)) for drift in (1e-9, 2.0**-11))
    assert (below.value, below.low, below.high) == (at.value, at.low, at.high)
    # A second one that is coarser allows more, and says less.
    two, one = (
        verdict.slope(given(float32=1e-4, float16=0.0, bfloat16=0.0)),
        verdict.slope(given(float32=1e-4, float16=0.0)),
    )
    assert (two.value, two.low, two.high) == (one.value, one.low, one.high)
    assert verdict.slope(given(float64=0.0, float32=2.0**-25)) is None
    assert verdict.slope(given(float32=1e-6)) is None
    assert verdict.judge(given(float16=1e-5, bfloat16=1e-5)).kind == "undecided"


def test_one_text_of_many_is_enough():
    rows = law()
    rows.loc[rows["sample"] == 5, "drift"] = 0.1
    assert verdict.judge(rows).kind == "bug"


def test_an_interval_that_holds_both_decides_nothing():
    assert verdict.judge(law(dtypes=("float16", "bfloat16"))).kind == "undecided"
    assert verdict.judge(law(floor=1e-4, dtypes=("float32", "float16", "bfloat16"))).kind == "undecided"
    # Control: with one finer dtype the same two are decided.
    assert verdict.judge(law(dtypes=("float32", "float16", "bfloat16"))).kind == "rounding"
    assert verdict.judge(law(floor=0.01, dtypes=("float32", "float16", "bfloat16"))).kind == "bug"


def test_one_dtype_alone_decides_by_size_and_only_if_it_is_fine_enough():
    assert verdict.judge(law(dtypes=("float64",))).kind == "rounding"
    assert verdict.judge(law(floor=1e-6, dtypes=("float64",))).kind == "bug"
    assert verdict.judge(law(floor=0.1, dtypes=("float32",))).kind == "bug"
    assert verdict.judge(law(dtypes=("float32",))).kind == "rounding"
    assert verdict.judge(law(constant=500, dtypes=("float32",))).kind == "undecided"
    assert verdict.judge(law(dtypes=("float16",))).kind == "undecided"
    assert verdict.judge(law(floor=0.5, dtypes=("bfloat16",))).kind == "undecided"


def test_bits_that_are_equal_everywhere_are_exact_and_in_the_finer_dtype_alone_no_bug():
    rows = law()
    assert verdict.judge(rows.assign(drift=0.0)).kind == "exact"
    assert verdict.judge(rows.assign(drift=rows["drift"].where(rows["dtype"] == "bfloat16", 0.0))).kind == "rounding"


def test_what_overflows_on_both_sides_is_left_out_and_on_the_cached_side_alone_is_a_bug():
    rows = law()
    fp16 = rows["dtype"] == "float16"
    both = verdict.judge(rows.assign(drift=rows["drift"].mask(fp16, np.nan)))
    assert both.kind == "rounding"
    assert list(both.left_out) == ["float16"]
    assert verdict.judge(rows.assign(drift=rows["drift"].mask(fp16, np.inf))).kind == "bug"
    assert verdict.judge(rows.assign(drift=np.nan)).kind == "undecided"


def test_a_difference_is_measured_against_the_spread_and_not_the_shift_of_logits():
    reference = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    assert probe.relative(reference, reference + 0.5, centred=True).item() == pytest.approx(0.5)
    assert probe.relative(reference - 99, reference - 98.5, centred=True).item() == pytest.approx(0.5)
    assert probe.relative(reference, reference).item() == 0
    assert probe.relative(reference, reference / 0).item() == np.inf
    assert np.isnan(probe.relative(reference / 0, reference).item())


# The command line.


def kvbook(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvbook", "check", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def trapped(family_folders, tmp_path_factory):
    """Copy a checkpoint and turn its cache off, as MPT's own default has it."""
    folder = tmp_path_factory.mktemp("trap") / "small-mpt"
    shutil.copytree(family_folders["mpt"], folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["use_cache"] is True
    (folder / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    return folder


@pytest.mark.slow
def test_a_sound_folder_gives_0_and_a_few_lines_of_numbers(family_folders, text_folder):
    done = kvbook(family_folders["llama"], "--corpus", text_folder, "--samples", 2, "--tokens", 12)
    assert done.returncode == 0, done.stderr
    assert "verdict   rounding: " in done.stdout
    assert "slope     " in done.stdout
    assert all(f" {dtype} " in done.stdout for dtype in ("float32", "float64")), "these two decide"
    assert "not tried float16; bfloat16" in done.stdout
    assert "remedy    none needed" in done.stdout
    assert len(done.stdout.splitlines()) <= 12


def test_a_cache_that_is_turned_off_gives_1_and_its_remedy(kvbook_here, trapped, text_folder):
    done = kvbook_here("check", trapped, "--corpus", text_folder, "--samples", 2, "--tokens", 12)
    assert done.returncode == 1, done.stderr
    assert "verdict   bug: " in done.stdout
    assert "layer     layer 1 of 2 is the first beyond rounding" in done.stdout
    assert "float64" not in done.stdout.split("not tried")[0], "the size in fp32 is certain already"
    assert '"use_cache": true' in done.stdout
    assert "with use_cache=True: rounding" in done.stdout


@pytest.mark.parametrize("arguments", [("/nowhere",), ("llama", "--dtypes", "float8"), ("llama", "--prefix", "alone")])
def test_what_cannot_be_run_gives_2_and_one_line(kvbook_here, arguments):
    done = kvbook_here("check", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvbook: ")
    assert done.stderr.count("\n") == 1


def settings(model, corpus_folder, **changes) -> CheckSettings:
    return CheckSettings.checked(model=str(model), corpus=str(corpus_folder), n_samples=2, n_tokens=12, **changes)


def test_every_causal_family_is_sound_as_it_ships(text_folder):
    here = [family for family in CAUSAL if (paths.STANDINS / family / "config.json").is_file()]
    assert here
    for family in here:
        found = check.check(settings(family, text_folder, dtypes="float64,float32"))
        assert found.status == outcome.SOUND, (family, found.lines)


def test_a_clean_mixture_of_experts_is_decided_at_default_settings_also_where_fp64_has_no_kernel(
    bpe, text_folder, tmp_path, monkeypatch
):
    torch.manual_seed(5)
    config = GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=64, initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    tokenizers.for_family(bpe, "llama", 64).save_pretrained(tmp_path)
    asked = CheckSettings.checked(model=str(tmp_path), corpus=str(text_folder))
    found = check.check(asked)
    assert found.status == outcome.SOUND, found.lines
    fine = check.check(asked.model_copy(update={"dtypes": ("float32", "float16", "bfloat16")}))
    assert fine.status == outcome.SOUND, fine.lines
    # Control: with a bug that 16 bits hide it is not.
    stock = loading.load
    with ExitStack() as planted:

        def with_a_bug(*arguments, **options):
            loaded = stock(*arguments, **options)
            planted.enter_context(faults.kept_in_16_bits(loaded.model))
            return loaded

        monkeypatch.setattr(loading, "load", with_a_bug)
        assert check.check(asked).status != outcome.SOUND


def test_a_model_that_sees_both_sides_is_refused_in_words(family_folders, text_folder):
    with pytest.raises(UserError, match=r"masked model.*is_decoder=true"):
        check.check(settings(family_folders["roberta"], text_folder))


def test_dtypes_that_do_not_fit_are_left_out_and_named(family_folders, text_folder, monkeypatch):
    stock = placement.dtype_on

    def without_fp64(name, device):
        if name == "float64":
            raise UserError("device 'mps' has no float64 arithmetic: leave float64 out of the dtypes")
        return stock(name, device)

    monkeypatch.setattr(placement, "dtype_on", without_fp64)
    found = check.check(settings(family_folders["gpt2"], text_folder))
    assert found.status != outcome.BUG
    assert any("float64" in line and "left out: device 'mps' has no float64" in line for line in found.lines)
    with pytest.raises(UserError, match="no float64"):
        check.check(settings(family_folders["gpt2"], text_folder, dtypes="float64"))


def test_a_dtype_that_the_models_own_kernels_lack_is_left_out_and_one_line_where_none_is_left(
    family_folders, text_folder, monkeypatch
):
    measure = check.rows_of

    def without(*lacking):
        def rows_of(model, dtype, *arguments, **options):
            if dtype in lacking:
                raise RuntimeError("expected Float")
            return measure(model, dtype, *arguments, **options)

        monkeypatch.setattr(check, "rows_of", rows_of)

    asked = settings(family_folders["llama"], text_folder, dtypes=["float64", "float32"])
    without("float64")
    found = check.check(asked)
    assert any("float64" in line and "left out" in line and "expected Float" in line for line in found.lines)
    without("float64", "float32")
    with pytest.raises(UserError, match="expected Float"):
        check.check(asked)


def test_a_model_whose_cached_call_fails_could_not_be_run(family_folders, text_folder, monkeypatch):
    def fails(*arguments, **options):
        raise IndexError("index 9 is out of bounds\nand more")

    monkeypatch.setattr(probe, "cached_rows", fails)
    with pytest.raises(UserError, match="IndexError: index 9 is out of bounds") as error:
        check.check(settings(family_folders["gpt2"], text_folder))
    assert "\n" not in str(error.value)


def test_texts_too_short_to_be_cut_are_refused(family_folders, tmp_path):
    (tmp_path / "a.txt").write_text("x + ")
    with pytest.raises(UserError, match="longer texts"):
        check.check(settings(family_folders["gpt2"], tmp_path).model_copy(update={"n_samples": 1}))


def test_a_mismatch_at_a_tokenizer_boundary_is_a_bug(family_folders):
    folder = str(family_folders["llama"])
    tokenizer = loading.tokenizer(folder)
    word = next(token for token in map(tokenizer.decode, range(300, 20, -1)) if token.isalpha() and len(token) > 1)
    (_, said, remedy), status = tokenizer_boundary.check(folder, word[0], word[1:])
    assert status == outcome.BUG
    assert "tokenizer boundary mismatch at token" in said
    assert "reusable" in remedy
    # Control: digits stand alone.
    assert tokenizer_boundary.check(folder, "7", "7")[1] == outcome.SOUND
