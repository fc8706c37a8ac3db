"""The judge of bug or rounding is right on injected bugs, on clean families, and on rows whose answer is known."""

import copy
import re
import shutil
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from refusing import refusal
from small_models import asked, configure, small_llama

from kvbook.atlas import configurations
from kvbook.diagnosis import check, faults, outcome, probe, tokenizer_boundary, verdict, wrong_pass
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.models import corpus, loading

DTYPES = tuple(UNIT_ROUNDOFF)
CAUSAL = ("gpt2", "llama", "qwen2", "mpt", "falcon")
CLEAN = "clean"
WAYS = (probe.SPLIT, *probe.WAYS)


# Families and faults: every combination is measured once, in every dtype.


@pytest.fixture(scope="module")
def measured(family_folders) -> pd.DataFrame:
    rows = []
    for family in CAUSAL:
        for dtype in DTYPES:
            loaded = loading.load(str(family_folders[family]), dtype=dtype)
            ids = loaded.tokenizer("def f(x):\n    return x + 1\n# What is it? Help.\n")["input_ids"][:12]
            config = loaded.model.config
            injected = {name: fault.inject for name, fault in faults.FAULTS.items() if fault.applies(config)}
            for name, inject in {CLEAN: nullcontext, faults.SEAM: nullcontext, **injected}.items():
                # Every vocabulary has a boundary that moves.
                pair = faults.seam(loaded.tokenizer, ids) if name == faults.SEAM else (ids, ids)
                whole, fed = (torch.tensor([each]) for each in pair)
                about = {"family": family, "fault": name, "dtype": dtype, "source": "text", "sample": 0}
                with inject(loaded.model):
                    found = probe.readings(loaded.model, whole, fed, np.random.default_rng(0), WAYS)
                    rows += [about | reading._asdict() for (reading,) in found]
    return pd.DataFrame(rows)


def kinds(rows: pd.DataFrame) -> dict[tuple, str]:
    return {key: verdict.judge(part).kind for key, part in rows.groupby(["family", "fault", "way"])}


def test_every_injected_bug_is_called_a_bug_in_every_family_and_way(measured):
    found = kinds(measured[measured["fault"] != CLEAN])
    assert {key: kind for key, kind in found.items() if kind != "bug"} == {}
    # MPT has ALiBi, and no positions to get wrong in two ways.
    assert len(found) == len(WAYS) * (len(CAUSAL) * (len(faults.FAULTS) + 1) - 2)


def test_no_clean_family_is_called_a_bug_in_all_dtypes_or_in_any(measured):
    clean = measured[measured["fault"] == CLEAN]
    for dtypes in (DTYPES, DTYPES[1:]):
        assert set(kinds(clean[clean["dtype"].isin(dtypes)]).values()) <= {"rounding", "exact"}
    for dtype in DTYPES:
        assert "bug" not in kinds(clean[clean["dtype"] == dtype]).values()


def test_a_bug_is_found_without_fp64_unless_16_bits_hide_it(measured):
    coarse = measured[(measured["dtype"] != "float64") & (measured["fault"] != CLEAN)]
    hidden = coarse["fault"] == "cache kept in 16 bits"
    assert set(kinds(coarse[~hidden]).values()) == {"bug"}
    # Without fp64 fp32 is too fine to pass it off as rounding, if it is not too coarse to be sure.
    assert set(kinds(coarse[hidden]).values()) <= {"bug", "undecided"}
    # Control: where only 16 bits are looked at, it is not there to be seen.
    assert "bug" not in kinds(coarse[hidden & (coarse["dtype"] != "float32")]).values()


def rows_in_fp64(model) -> pd.DataFrame:
    return pd.DataFrame(probe.rows_of(model, "float64", [corpus.Sample(0, "text", 0, list(range(11, 31)))]))


def test_control_softmax_in_32_bits_would_make_a_sound_mpt_look_like_a_bug(family_folders, monkeypatch):
    model = loading.load(str(family_folders["mpt"]), dtype="float64").model
    assert verdict.judge(rows_in_fp64(model)).kind == "rounding"
    monkeypatch.setattr(probe.in_fp64, "widened", lambda dtype: nullcontext())
    assert verdict.judge(rows_in_fp64(model)).kind == "bug"


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_is_taken_out_again_also_after_an_error(name, llama):
    ids = torch.arange(11, 31)[None]

    def last() -> torch.Tensor:
        with torch.inference_mode():
            return probe.cached_rows(llama, ids, [15, 5])[0][0].logits

    before = last()
    with faults.FAULTS[name].inject(llama):
        assert not torch.equal(last(), before)
    assert torch.equal(last(), before)
    with pytest.raises(KeyboardInterrupt), faults.FAULTS[name].inject(llama):
        raise KeyboardInterrupt
    assert torch.equal(last(), before)


@pytest.mark.parametrize(("family", "plant", "layer"), [
    ("llama", lambda model: faults.one_step_late(model, layers={0}), 1),
    ("llama", lambda model: faults.kept_in_16_bits(model, layers={3}), 4),
    # Positions that are added to the embedding.
    ("gpt2", faults.offset_forgotten, 0),
])
def test_the_first_suspicious_layer_is_the_one_in_which_the_bug_is(request, family, plant, layer):
    model = copy.deepcopy(request.getfixturevalue(family)).double()
    with plant(model):
        assert probe.suspicious_layer(rows_in_fp64(model)) == layer


def test_a_fault_after_the_last_layer_is_in_no_layer(llama):
    model = copy.deepcopy(llama).double()
    # Control: rounding is somewhere before the head.
    assert probe.suspicious_layer(rows_in_fp64(model)) is not None
    head = model.lm_head.forward
    model.lm_head.forward = lambda states: head(states) * (1 if states.shape[1] > 10 else 1 + torch.arange(320) / 320)
    assert verdict.judge(rows_in_fp64(model)).kind == "bug"
    assert probe.suspicious_layer(rows_in_fp64(model)) is None


# The verdict, on rows whose answer is known.


def law(constant: float = 8.0, floor: float = 0.0, dtypes=DTYPES, scatter: float = 0.3, n: int = 12) -> pd.DataFrame:
    """Drift by a constant number of roundoffs, and a floor that does not fall with them."""
    generator = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "dtype": dtype, "source": f"file {sample // 2}", "sample": sample,
            "drift": floor + constant * UNIT_ROUNDOFF[dtype] * np.exp(scatter * generator.standard_normal()),
        }
        for dtype in dtypes
        for sample in range(n)
    )


def given(**drifts: float) -> pd.DataFrame:
    """Every text has the same drift: four texts from two files."""
    return pd.concat([law(0.0, drift, (dtype,), n=4) for dtype, drift in drifts.items()], ignore_index=True)


def roundoffs(*multiples: float, dtypes=DTYPES) -> dict[str, float]:
    return {dtype: times * UNIT_ROUNDOFF[dtype] for dtype, times in zip(dtypes, multiples, strict=True)}


def in_one_text(rows: pd.DataFrame, drift: float) -> pd.DataFrame:
    return rows.assign(drift=rows["drift"].where(rows.index != 5, drift))


COARSE = ("float32", "float16", "bfloat16")
# Seen on one processor: 16 bits make nearly all logits equal, so that drift there is far below its roundoff.
NEARLY_EQUAL = {"float16": 3.0e-7, "bfloat16": 0.0}
EDGE = verdict.ROUNDING["float32"] * 2.0**-24
KNOWN = {
    "bug": {
        "flat": law(floor=0.1), "flat and small, but fp64 sees it": law(floor=1e-10),
        "one text of many": in_one_text(law(), 0.1), "flat without fp64": law(floor=0.01, dtypes=COARSE),
        "large, and 16 bits as good as equal": given(float64=2e-4, float32=2e-4, **NEARLY_EQUAL),
        "fp64 alone": law(floor=1e-6, dtypes=("float64",)),
        "fp32 alone, and large": law(floor=0.1, dtypes=("float32",)),
        "only the cached pass overflows": law().assign(drift=law()["drift"].mask(law()["dtype"] == "float16", np.inf)),
    },
    "rounding": {
        "falls with the roundoff": law(), "below what fp64 resolves": law(floor=1e-15),
        "falls without fp64": law(dtypes=COARSE),
        "small, and 16 bits as good as equal": given(float64=1.1e-15, float32=5.8e-7, **NEARLY_EQUAL),
        "fp64 alone": law(dtypes=("float64",)), "fp32 alone": law(dtypes=("float32",)),
        "just inside the edge of fp32": given(float32=0.99 * EDGE),
        "equal in the finer dtypes": law().assign(drift=law()["drift"].where(law()["dtype"] == "bfloat16", 0.0)),
        "both passes overflow in fp16": law().assign(drift=law()["drift"].mask(law()["dtype"] == "float16")),
        **{f"without fp64 {n}": given(**roundoffs(*n, dtypes=COARSE)) for n in ((10, 0.01, 30), (80, 0, 0))},
        **{f"within fp64's {n}": given(**roundoffs(*n)) for n in ((10, 10, 0.01, 30), (20_000, 1, 0, 100))},
    },
    "exact": {"no drift": law().assign(drift=0.0)},
    "undecided": {
        "16 bits alone": law(dtypes=("float16", "bfloat16")),
        "flat without fp64, and small": law(floor=1e-4, dtypes=COARSE),
        "fp32 alone, and larger": law(constant=500, dtypes=("float32",)), "fp16 alone": law(dtypes=("float16",)),
        "bf16 alone, however large": law(floor=0.5, dtypes=("bfloat16",)),
        "just outside the edge of fp32": given(float32=1.01 * EDGE),
        "one text outside the edge of fp32": in_one_text(law(constant=0.1, dtypes=("float32",)), 2 * EDGE),
        "nothing above a roundoff": given(float16=1e-5, bfloat16=1e-5),
        "overflow everywhere": law().assign(drift=np.nan),
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KNOWN for name in KNOWN[kind]])
def test_the_verdict_on_rows_whose_answer_is_known(kind, name):
    assert verdict.judge(KNOWN[kind][name]).kind == kind


def test_the_slope_is_that_of_the_law_and_needs_something_that_could_fall():
    assert verdict.slope(law(scatter=0)).value == pytest.approx(1)
    rounding, bug = (verdict.judge(rows).slope for rows in (law(), law(floor=0.1)))
    assert rounding.low < 1 < rounding.high
    assert bug.low < 0 < bug.high
    # What is below a roundoff counts as one; a second such dtype, which is coarser, says nothing more.
    below, at = (verdict.slope(given(float32=1e-6, float16=drift, bfloat16=0.1)) for drift in (1e-9, 2.0**-11))
    assert below == at
    two = verdict.slope(given(float32=1e-4, float16=0.0, bfloat16=0.0))
    assert two == verdict.slope(given(float32=1e-4, float16=0.0))
    assert verdict.slope(given(float64=0.0, float32=2.0**-25)) is None
    assert verdict.slope(given(float32=1e-6)) is None


def test_what_overflows_in_both_passes_is_left_out():
    assert "float16" not in verdict.judge(KNOWN["rounding"]["both passes overflow in fp16"]).drift


def test_a_difference_is_measured_against_the_spread_and_not_the_shift_of_logits():
    reference = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    assert probe.relative(reference, reference + 0.5, centred=True).item() == pytest.approx(0.5)
    assert probe.relative(reference - 99, reference - 98.5, centred=True).item() == pytest.approx(0.5)
    assert probe.relative(reference, reference).item() == 0
    assert probe.relative(reference, reference / 0).item() == np.inf
    assert np.isnan(probe.relative(reference / 0, reference).item())


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "qwen2"])
def test_the_first_layers_state_is_its_output_whether_or_not_a_class_gives_that_of_the_embedding(name):
    model, seen = configurations.build(name), []
    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    layers[0].register_forward_hook(lambda _layer, _inputs, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        (found,) = probe.last_tokens(model(configurations.text(8), output_hidden_states=True))
    assert torch.equal(found.hidden[1], seen[0][0, -1])


# The command line.


def test_a_cache_that_is_turned_off_gives_1_and_its_remedy(kvbook_here, family_folders, text_folder, tmp_path):
    # As MPT's own default has it.
    shutil.copytree(family_folders["mpt"], tmp_path, dirs_exist_ok=True)
    configure(tmp_path, use_cache=False)
    done = kvbook_here("check", tmp_path, "--corpus", text_folder, "--samples", 2, "--tokens", 12)
    assert done.returncode == 1, done.stderr
    assert "verdict   bug: " in done.stdout
    assert "layer     layer 1 of 2 is the first beyond rounding" in done.stdout
    assert "float64" not in done.stdout.split("not tried")[0], "the size in fp32 is certain already"
    assert '"use_cache": true' in done.stdout
    assert "with use_cache=True: rounding" in done.stdout


def test_texts_too_short_to_be_cut_are_refused(gpt2_folder, tmp_path):
    (tmp_path / "a.txt").write_text("x + ")
    assert "longer texts" in refusal(lambda: check.check(asked(gpt2_folder, tmp_path, n_samples=1)))


def test_a_corpus_without_one_text_that_is_long_enough_does_not_advise_no_samples(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    said = refusal(lambda: list(corpus.samples(str(tmp_path), loading.tokenizer("gpt2"), 1, 50)))
    assert said.endswith("asked for: add files, or name longer texts")


def test_a_prefix_that_ends_in_a_space_shows_the_token_that_the_space_becomes():
    lines, status = tokenizer_boundary.check("llama", "Once upon a ", "time")
    assert status == 1
    assert "ends with ''" not in "\n".join(lines)
    assert "alone the prefix ends with" in "\n".join(lines)


def test_a_mismatch_at_a_tokenizer_boundary_is_a_bug(llama_folder):
    tokenizer = loading.tokenizer(str(llama_folder))
    word = next(token for token in map(tokenizer.decode, range(300, 20, -1)) if token.isalpha() and len(token) > 1)
    (_, said, remedy), status = tokenizer_boundary.check(str(llama_folder), word[0], word[1:])
    assert status == outcome.BUG
    assert "tokenizer boundary mismatch at token" in said
    assert "reusable" in remedy
    # Control: digits stand alone.
    assert tokenizer_boundary.check(str(llama_folder), "7", "7")[1] == outcome.SOUND
    assert faults.seam(tokenizer, tokenizer("7 7")["input_ids"]) is None


# Of two passes that disagree the wrong one is named; where the evidence splits, neither is.

TEXTS = [torch.arange(start, start + 20)[None] for start in (11, 40)]


def hidden_without_a_cache(model):
    """Hide the first token from a pass without a cache, as a wrong full pass would."""

    def call(stock, ids, cache, options):
        if not options.get("use_cache"):
            options |= faults._seen(ids, 0, slice(0, 1))
        return stock(ids, past_key_values=cache, **options)

    return faults._calls(model, call)


@pytest.mark.parametrize(("fault", "causal", "said", "why"), [
    (faults.offset_forgotten, True, wrong_pass.CACHED, "how a text is cut"),
    (faults.mask_off_by_one, True, wrong_pass.CACHED, "how a text is cut"),
    (hidden_without_a_cache, True, wrong_pass.UNCACHED, "however a text is cut"),
    (nullcontext, False, wrong_pass.UNCACHED, "a later token moves"),
    # Evidence that splits, and passes that agree.
    (faults.offset_forgotten, False, wrong_pass.UNTOLD, "how a text is cut.*a later token moves"),
    (nullcontext, True, wrong_pass.UNTOLD, "no evidence for either"),
])
def test_the_wrong_pass_is_named_and_neither_where_evidence_splits(fault, causal, said, why, monkeypatch):
    if not causal:
        monkeypatch.setattr(wrong_pass, "reference_fault", lambda *_: wrong_pass.NOT_CAUSAL)
    model = small_llama()
    with fault(model):
        found = wrong_pass.find(model, TEXTS)
    assert found[0] == said
    assert re.search(why, "; ".join(found[1]))


@pytest.mark.parametrize(("cached", "uncached", "said"), [
    (2.0, 3.0, [wrong_pass.UNCACHED]), (3.0, 2.0, [wrong_pass.CACHED]), (2.0, 2.01, []),
    # As good as a blind guess among 320 tokens: the model has learnt nothing.
    (5.5, 7.0, []),
])
def test_a_trained_models_loss_tells_which_pass_reads_the_text_better(cached, uncached, said, monkeypatch):
    losses = iter([uncached, cached])
    monkeypatch.setattr(wrong_pass, "_loss", lambda *_: next(losses))
    assert [side for side, _ in wrong_pass._by_loss(wrong_pass.feeding.Fed(small_llama()), TEXTS)] == said


def test_a_trained_models_loss_is_evidence_too():
    trained = loading.load("llama")
    text = torch.tensor([trained.tokenizer("def add(first, second):\n    return first + second\n")["input_ids"]])
    with faults.offset_forgotten(trained.model):
        said, why = wrong_pass.find(trained.model, [text])
    assert said == wrong_pass.CACHED
    assert "nats a token" in why[-1]


def test_a_fault_is_injected_whatever_a_release_calls_the_cache(monkeypatch):
    model, ids = small_llama(), torch.arange(8)[None]
    stock = model.forward

    # As transformers 5.24 names it.
    def forward(input_ids, cache=None, **options):
        return stock(input_ids, past_key_values=cache, **options)

    monkeypatch.setattr(model, "forward", forward)
    with torch.inference_mode():
        sound = model(ids).logits[0, -1]
        with faults.offset_forgotten(model):
            found = [model(ids[:, -1:], **{name: model(ids[:, :-1], use_cache=True).past_key_values}).logits[0, -1]
                     for name in ("cache", "past_key_values")]
    assert torch.equal(*found)
    assert not torch.allclose(found[0], sound, atol=1e-3)
