"""A cache that is meant to keep few bits is told from a defect, in `kvbook check` and in `check_step`."""

import runpy

import numpy as np
import pandas as pd
import pytest
import torch
from refusing import refusal
from small_models import asked
from transformers import QuantizedCache
from transformers.cache_utils import DynamicLayer, Fp8QuantizedLayer

import kvbook
from kvbook import paths
from kvbook.diagnosis import check, faults, outcome, probe, storage
from kvbook.measuring import rounded_caches
from kvbook.models import corpus, loading

NARROW = {
    "float16": lambda states: states.to(torch.float16).to(states.dtype),
    "bfloat16": lambda states: states.to(torch.bfloat16).to(states.dtype),
    "int8": lambda states: rounded_caches.rounded(states, 8),
    "fp8": lambda states: states.to(torch.float8_e4m3fn).to(states.dtype),
    "int4": lambda states: rounded_caches.rounded(states, 4),
}


def keep(patch: pytest.MonkeyPatch, narrow) -> None:
    """Let every growing cache keep keys and values in few bits."""
    stock = DynamicLayer.update
    patch.setattr(
        DynamicLayer, "update",
        lambda self, keys, values, *rest, **more: stock(self, narrow(keys), narrow(values), *rest, **more),
    )


# What storage does to numbers.


@pytest.mark.parametrize("name", NARROW)
def test_moving_some_numbers_by_a_step_is_as_far_as_rounding_all_of_them(name):
    numbers = torch.randn(64, 1024, 32, generator=torch.Generator().manual_seed(0))
    rounding = (NARROW[name](numbers) - numbers).square().mean().sqrt().item()
    # Rounded already, it moves no less; rounded again, it would not move at all.
    for each in (numbers, NARROW[name](numbers)):
        assert (storage.moved([each], name)[0] - each).square().mean().sqrt().item() == pytest.approx(rounding, rel=0.1)


def test_of_a_state_only_what_is_stored_is_moved_and_the_state_itself_is_left_alone():
    state = {"keys": [np.ones((4, 50), np.float32)], "length": torch.tensor(3), "model": torch.nn.Linear(9, 9)}
    found = storage.moved(state, "int8")
    assert (found["keys"][0] != 1).any()
    assert (state["keys"][0] == 1).all()
    assert found["length"] == 3
    assert (found["model"].weight == state["model"].weight).all()
    # Beside numbers of 8 bits, floats are their scales.
    numbers, scales = storage.moved((torch.zeros(500, dtype=torch.int8), torch.ones(500)), "int8")
    assert set(numbers.tolist()) == {-1, 0, 1}
    assert (scales == 1).all()


# Models.


def _compared(model, texts) -> dict[str, storage.Storage]:
    rows = pd.DataFrame(probe.rows_of(model, "float32", texts, ways=probe.WAYS))
    moves = pd.DataFrame(storage.rows_of(model, "float32", texts, storage.narrower("float32")))
    return {found.name: found for found in storage.storages(rows, moves)}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["falcon", "llama"])
def test_on_trained_models_storage_explains_itself_looks_like_itself_and_8_bits_explain_no_fault(family):
    loaded = loading.load(family, dtype="float32")
    texts = list(corpus.samples("stdlib", loaded.tokenizer, 3, 24))
    for name in NARROW:
        with pytest.MonkeyPatch.context() as patch:
            keep(patch, NARROW[name])
            # Two texts are enough for formats; of so few, a fault may happen to look like one.
            found = _compared(loaded.model, texts[:2])
        assert found[name].explains, found[name]
        assert storage.nearest(list(found.values())) is found[name]
    for fault in (faults.offset_forgotten, faults.offset_by_one, faults.mask_off_by_one, faults.one_step_late):
        with fault(loaded.model):
            found = _compared(loaded.model, texts)
        assert [found[name].explains for name in ("int8", "fp8")] == [False, False], found
        assert storage.nearest(list(found.values())) is None, found


@pytest.fixture
def found_with(family_folders, text_folder, monkeypatch):
    """Return a function that checks a model whose cache keeps what `narrow` makes of keys and values."""

    def found(narrow, **asked_for):
        with monkeypatch.context() as patch:
            if narrow:
                keep(patch, narrow)
            return check.check(asked(family_folders["llama"], text_folder, **asked_for))

    return found


def test_a_declared_8_bit_cache_is_intended_and_says_how_far_rounding_goes(found_with):
    found = found_with(NARROW["int8"], cache_dtype="int8")
    assert (found.verdict, found.status, found.cause) == (outcome.INTENDED, outcome.SOUND, None)
    assert "times that of rounding each stored number to 8 bits (int8)" in found.why
    assert "would hide below it" in found.remedy
    assert {path.verdict for path in found.paths} == {outcome.INTENDED}


def test_an_undeclared_8_bit_cache_is_a_bug_that_looks_like_storage_in_8_bits(found_with):
    found = found_with(NARROW["int8"])
    assert (found.verdict, found.status) == ("bug", outcome.BUG)
    assert found.cause.startswith("looks like storage in 8 bits (int8)")
    assert "--cache-dtype int8 if they are meant to be in fewer bits; if it is not that, look at" in found.remedy


@pytest.mark.parametrize("fault", [faults.offset_forgotten, faults.one_step_late])
def test_a_declared_8_bit_cache_with_another_fault_is_a_bug(found_with, injected, fault):
    injected(fault)
    found = found_with(NARROW["int8"], cache_dtype="int8")
    assert (found.verdict, found.status) == ("bug", outcome.BUG)
    assert found.cause.startswith("storage in 8 bits (int8) does not explain it")


def _through_fp32(states):
    # Past the mode that widens every request for fp32.
    return torch.from_numpy(states.numpy().astype(np.float32).astype(states.numpy().dtype))


def _overflowing(states):
    return states * 1e6 if states.dtype is torch.float16 else NARROW["int8"](states)


@pytest.mark.parametrize(("narrow", "settings", "verdict", "cause"), [
    # Fewer bits than declared, and those that it has.
    (NARROW["int4"], {"cache_dtype": "float16"}, "bug", "storage in 16 bits"),
    (NARROW["int4"], {"cache_dtype": "int4"}, outcome.INTENDED, ""),
    (_through_fp32, {"dtypes": "fp64"}, "bug", "looks like storage in 32 bits (float32)"),
    (_through_fp32, {"dtypes": "fp64", "cache_dtype": "fp32"}, outcome.INTENDED, ""),
    # A cache that keeps every bit, and one beside a dtype that is no wider.
    (None, {"cache_dtype": "int8"}, "rounding", ""),
    (NARROW["float16"], {"dtypes": "fp64,bf16", "cache_dtype": "float16"}, outcome.INTENDED, ""),
    # An overflow, which fp64 alone does not see.
    (_overflowing, {"dtypes": "fp64,fp16", "cache_dtype": "int8"}, "bug",
     "storage in 8 bits (int8) does not explain it in float16"),
    (_overflowing, {"dtypes": "fp64", "cache_dtype": "int8"}, outcome.INTENDED, ""),
])
def test_a_declared_format_explains_its_own_drift_and_no_more(found_with, narrow, settings, verdict, cause):
    found = found_with(narrow, **settings)
    assert found.verdict == verdict
    assert (found.cause or "").startswith(cause)


def test_a_verdict_that_is_left_undecided_blames_no_storage():
    about = {"dtype": "bfloat16", "source": "a", "sample": 0, "layers": [0.5], "held": 1, "fed": 1}
    rows = pd.DataFrame([about | {"way": way, "drift": 0.5} for way in probe.WAYS])
    moves = pd.DataFrame([{"dtype": "bfloat16", "format": "int8", "drift": 0.01, "layers": [0.01], "furthest": 0.01}])
    found = check.judged(rows, True, 0, pd.DataFrame(), moves, "int8")
    assert (found["verdict"], found["cause"]) == ("undecided", None)


def test_a_model_that_returns_no_cache_is_told_so_though_one_is_declared(found_with, injected):
    injected(faults.no_cache)
    found = found_with(None, cache_dtype="int8")
    assert found.verdict == "bug"
    assert found.cause.startswith("no cache came back")


def test_the_other_paths_of_a_declared_cache_are_intended_and_one_with_a_fault_decides(found_with):
    asked_for = {"cache_dtype": "int8", "thorough": True, "dtypes": "fp32,fp64"}
    found = found_with(NARROW["int8"], **asked_for)
    assert found.verdict == outcome.INTENDED
    verdicts = {path.path: path.verdict for path in found.paths}
    assert (verdicts["chunked prefill"], verdicts["cropped cache"]) == (outcome.INTENDED, outcome.INTENDED)
    with faults.crop_one_short(None):
        found = found_with(NARROW["int8"], **asked_for)
    assert (found.verdict, found.path) == ("bug", "cropped cache")


def test_where_storage_cannot_be_measured_a_bug_stays_one_and_a_declaration_is_refused(
    found_with, injected, monkeypatch
):
    injected(faults.offset_forgotten)
    monkeypatch.setattr(storage, "_read_through", lambda *_: {}["keys"])
    assert found_with(None).verdict == "bug"
    said = refusal(found_with, None, cache_dtype="int8")
    assert "--cache-dtype int8: what rounding does to this model's cache cannot be" in said


def test_what_is_no_format_is_refused_in_one_line(refused, llama_folder):
    assert "cache_dtype = 'int7'" in refused("check", llama_folder, "--cache-dtype", "int7")


# Loops of one's own.

GPT = runpy.run_path(str(paths.ROOT / "examples" / "hand_written_gpt.py"))["GPT"]
IDS = list(range(20))


def keeping(store, mistake: str | None = None, read=lambda stored: stored):
    """Return a loop that stores its state in few bits."""
    model = GPT(mistake)

    def step(ids, state):
        logits, new = model(ids, state and [(read(keys), read(values), held) for keys, values, held in state])
        return logits, [(store(keys), store(values), held) for keys, values, held in new]

    return step


def packed(states):
    """Pack numbers into integers of 8 bits, with their scales."""
    scale = states.abs().amax(-1, keepdim=True) / 127
    return (states / scale).round().to(torch.int8), scale


@pytest.mark.parametrize("name", NARROW)
def test_a_loop_with_a_declared_state_is_intended_and_with_a_mistake_it_is_a_bug(name):
    found = kvbook.check_step(keeping(NARROW[name]), IDS, cache_dtype=name)
    assert (found.verdict, found.status) == (outcome.INTENDED, outcome.SOUND), found
    wrong = kvbook.check_step(keeping(NARROW[name], "positions restart"), IDS, cache_dtype=name)
    assert (wrong.verdict, wrong.first_wrong) == ("bug", 1)
    assert "does not explain it" in wrong.cause


@pytest.mark.parametrize("mistake", [None, "positions restart", "mask not extended", "window cropped too short"])
def test_integers_with_scales_are_intended_and_with_a_mistake_a_bug(mistake):
    step = keeping(packed, mistake, read=lambda stored: stored[0] * stored[1])
    assert kvbook.check_step(step, IDS, cache_dtype="int8").verdict == ("bug" if mistake else outcome.INTENDED)


def test_an_undeclared_state_of_few_bits_looks_like_them_and_no_mistake_does():
    for name in ("fp8", "int4"):
        found = kvbook.check_step(keeping(NARROW[name]), IDS)
        assert found.cause.startswith("looks like storage in")
        assert f"cache_dtype={name!r}; if not: " in found.cause
    for mistake in ("positions restart", "mask not extended", "cached before rotation", "window cropped too short"):
        assert "looks like" not in kvbook.check_step(GPT(mistake), IDS).cause


def test_a_state_in_which_nothing_is_stored_cannot_be_declared():
    model = GPT()

    def step(ids, state):
        # The whole text so far, read again with one row of it wrong.
        seen = ids if state is None else torch.cat([state, ids], 1)
        return model(seen.roll(int(state is not None), 1))[0][:, -ids.shape[1] :], seen

    for name, words in (("int8", "the state holds no numbers"), ("int7", "is none of float32")):
        assert words in refusal(kvbook.check_step, step, IDS, cache_dtype=name)


def test_transformers_quantized_cache_declares_itself(llama, monkeypatch):
    def step(ids, state):
        cache = QuantizedCache("fp8", config=llama.config) if state is None else state
        output = llama(ids, past_key_values=cache, use_cache=True)
        return output.logits, output.past_key_values

    # It takes its scale from the first call; after a single token larger numbers would be clipped, which is no
    # rounding.
    clipped = kvbook.check_step(step, IDS)
    assert (clipped.verdict, clipped.path) == ("bug", "token by token")
    assert {path.path: path.verdict for path in clipped.paths}["in chunks"] != "exact"
    stock = Fp8QuantizedLayer._quantize

    def with_room(self, states, scale=None):
        return stock(self, states, 8 * stock(self, states)[1] if scale is None else scale)

    monkeypatch.setattr(Fp8QuantizedLayer, "_quantize", with_room)
    assert kvbook.check_step(step, IDS).verdict == outcome.INTENDED
    with faults.offset_forgotten(llama):
        assert kvbook.check_step(step, IDS).verdict == "bug"


def test_a_declaration_of_no_fewer_bits_than_the_loop_computes_with_explains_nothing():
    found = kvbook.check_step(GPT("positions restart"), IDS, cache_dtype="float32", dtype="float32")
    assert found.verdict == "bug"
    assert "storage" not in found.cause
