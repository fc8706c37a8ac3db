"""Checking one's own loop and one's own tests: `check_step`, `assert_cache_matches`, and their tolerance."""

import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from refusing import refusal
from small_models import drawn

import kvbook
from kvbook import paths
from kvbook.diagnosis import faults, tolerance
from kvbook.models import loading
from kvbook.runs import recording, records

IDS = list(range(20))
EXAMPLE = runpy.run_path(str(paths.ROOT / "examples" / "hand_written_gpt.py"))
GPT = EXAMPLE["GPT"]
MODEL, HALF = GPT(), GPT().bfloat16()


# Where each of the example's mistakes must be found: path, position, end of the module's name, words of the cause.
WHERE = {
    "positions restart": ("token by token", 1, "attention.rotary", "positions that begin again at 0"),
    "cached before rotation": ("token by token", 1, "attention.out", "keys cached before they are rotated"),
    "mask not extended": ("in chunks", len(IDS) // 3, "attention.out", "shift the causal mask"),
    # Half of a window of 8, and the new token itself.
    "window cropped too short": ("token by token", 5, "attention.out", "right as long as the state holds 5 tokens"),
}


@pytest.mark.parametrize("mistake", WHERE)
def test_each_mistake_of_the_hand_written_gpt_is_found_and_located(mistake):
    model = GPT(mistake)
    found = kvbook.check_step(model, IDS, modules=model)
    path, position, module, cause = WHERE[mistake]
    assert (found.verdict, found.path, found.first_wrong) == ("bug", path, position)
    assert found.module == f"blocks.0.{module}"
    assert cause in found.cause
    assert len(found.lines) <= 5
    assert set(WHERE) == set(EXAMPLE["MISTAKES"])


def test_a_bug_that_only_some_later_layer_has_is_located_there():
    model, broken = GPT(), GPT("positions restart")
    model.blocks[1] = broken.blocks[1]
    assert kvbook.check_step(model, IDS, modules=model).module == "blocks.1.attention.rotary"


# Loops of other kinds.


def of_numpy(dtype, change=1.0):
    """Return a loop without a batch dimension, whose state changes by a factor."""
    table = np.random.default_rng(0).standard_normal((20, 20)).astype(dtype)

    def step(ids, state):
        sums = table[ids].cumsum(0) + (0 if state is None else state)
        return sums, sums[-1] * np.asarray(change, dtype)

    return step


def giving(change, model=MODEL):
    """Return a loop that changes the logits of a model."""
    def step(ids, state):
        logits, state = model(ids, state)
        return change(logits), state

    return step


def of_the_last(logits):
    return logits[0, -1]


def of_single_tokens(ids, state):
    if state is not None and ids.shape[1] > 1:
        raise ValueError("one token at a time")
    return MODEL(ids, state)


def sharing(shared):
    def step(ids, state):
        logits, shared["state"] = MODEL(ids, None if state is None else shared["state"])
        return logits, "somewhere"

    return step


def of_an_encoder_decoder(restarts):
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48}
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=32, **sizes, initializer_factor=3.0)
    model = transformers.T5ForConditionalGeneration(config).eval().double()
    heard = model.get_encoder()(torch.arange(7)[None])

    def step(ids, state):
        # The mistake: after the first call, only the encoder's keys are kept.
        if restarts and state:
            state = transformers.EncoderDecoderCache(transformers.DynamicCache(), state.cross_attention_cache)
        out = model(decoder_input_ids=ids, encoder_outputs=heard, past_key_values=state, use_cache=True)
        return out.logits, out.past_key_values

    return step


SOUND, BUG, UNDECIDED = 0, 1, 2


@pytest.mark.parametrize(("step", "status", "words"), [
    (of_numpy("float32"), SOUND, ""), (of_numpy("float64"), SOUND, ""), (of_numpy("float64", 1.01), BUG, ""),
    (MODEL.forward, SOUND, "rounding; in chunks: rounding; with another text in between: rounding"),
    (giving(of_the_last), SOUND, ""), (giving(of_the_last, GPT("positions restart")), BUG, ""),
    (of_single_tokens, SOUND, "in chunks: not supported"),
    (of_an_encoder_decoder(restarts=False), SOUND, ""), (of_an_encoder_decoder(restarts=True), BUG, ""),
    (lambda ids, _state: MODEL(ids), BUG, "what was fed before has no effect"),
    (sharing({}), BUG, "token by token: rounding; in chunks: rounding; with another text in between: bug"),
    (sharing({}), BUG, "the state is shared"),
    (giving(lambda logits: logits.flip(1)), UNDECIDED, "later ones follow"),
    (giving(torch.nn.functional.dropout), UNDECIDED, "dropout is on"),
    (giving(torch.Tensor.float, HALF), UNDECIDED, "numbers of bfloat16, held in float32: name dtype='bfloat16' if"),
])
def test_a_loop_of_any_kind_is_checked_and_its_mistake_named(step, status, words):
    found = kvbook.check_step(step, np.array(IDS) if "of_numpy" in step.__qualname__ else IDS, modules=MODEL)
    assert found.status == status
    if status != BUG:
        assert (found.first_wrong, found.module, found.cause) == (None, None, None)
    assert words in str(found).replace("exact", "rounding")


@pytest.mark.parametrize(("step", "ids", "words"), [
    *((GPT(), ids, "6 or more tokens of one text") for ids in ([1, 2, 3], None, [0.5] * 9, np.ones((2, 9), int))),
    (lambda ids, state: ("text", state), IDS, "return (logits, state)"),
    (lambda ids, _state: torch.zeros(1, ids.shape[1], 9), IDS, "step returned Tensor, not a pair"),
    (lambda ids, state: (torch.zeros(1, ids.shape[1] - 1, 9), state), IDS, "logits of 19 tokens for 20"),
    (lambda ids, state: (ids[0][:, None].expand(-1, 5), state), IDS, "name dtype="),
])
def test_what_is_no_loop_is_refused_in_one_line(step, ids, words):
    assert words in refusal(kvbook.check_step, step, ids)


# Tests of models.


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "mpt", "falcon"])
def test_a_sound_model_passes_in_every_dtype(family_folders, family, dtype):
    kvbook.assert_cache_matches(loading.load(str(family_folders[family]), dtype=dtype).model)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_every_injected_fault_fails_and_its_place_is_named(llama_folder, name):
    model = loading.load(str(llama_folder), dtype="float32").model
    with faults.FAULTS[name].inject(model), pytest.raises(AssertionError, match=r"more than .* beyond it"):
        kvbook.assert_cache_matches(model)
    kvbook.assert_cache_matches(model)


def test_a_bug_in_16_bits_is_beyond_the_tolerance_of_16_bits_too(llama_folder):
    model = loading.load(str(llama_folder), dtype="bfloat16").model.train()
    with faults.offset_forgotten(model), pytest.raises(AssertionError, match=r"after layer 1 beyond it; .* .eval"):
        kvbook.assert_cache_matches(model)


TINY = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize(("make", "words"), [
    (lambda: MODEL.forward, "no model of transformers"),
    (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**TINY)), "is an encoder-decoder"),
    (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TINY)), "give a causal language model"),
    (lambda: transformers.LlamaModel(transformers.LlamaConfig(**TINY)), "with its head"),
])
def test_what_the_assertion_cannot_take_is_refused_in_one_line(make, words):
    assert words in refusal(lambda: kvbook.assert_cache_matches(make()))


def test_equal_logits_are_no_agreement(llama_folder):
    model = loading.load(str(llama_folder), dtype="float64").model
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    with pytest.raises(AssertionError, match="differ by nan"):
        kvbook.assert_cache_matches(model)


def test_a_model_of_few_positions_and_texts_in_a_list_are_taken():
    model = drawn(0, transformers.GPT2Config(**TINY, n_positions=16))
    kvbook.assert_cache_matches(model)
    kvbook.assert_cache_matches(model, [1, 2, 3, 4, 5])


def test_ones_own_tolerance_and_texts_are_taken(llama):
    with pytest.raises(AssertionError, match=r"more than 1e-12"):
        kvbook.assert_cache_matches(llama, within=1e-12)
    assert "cannot be cut" in refusal(lambda: kvbook.assert_cache_matches(llama, torch.ones(1, 3, dtype=torch.long)))


# The tolerance.


def test_the_shipped_reference_is_what_its_recorded_run_gives():
    shipped = json.loads(tolerance.FILE.read_text("utf-8"))
    run = records.load(paths.RECORDED_RUNS / "layer_drift" / shipped["run"]["folder"])
    assert recording.rounding_of(run) == shipped
    # Control: not what other rows give.
    run.rows["relative_rms"] *= 1.5
    assert recording.rounding_of(run) != shipped


def test_another_experiments_run_is_no_reference():
    other = records.load(next((paths.RECORDED_RUNS / "static_speed").iterdir()))
    assert "name one of layer_drift" in refusal(recording.rounding_of, other)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_tolerance_grows_with_depth_and_is_above_every_published_row(dtype):
    assert tolerance.of(dtype, 2) < tolerance.of(dtype, 30) < tolerance.of(dtype, 80)
    published = tolerance.reference()["roundoffs"].get(dtype, [])
    assert all(drift <= 1.001 * tolerance.roundoffs(dtype, layer) for layer, drift in enumerate(published) if drift > 1)


@pytest.mark.slow
def test_importing_the_package_or_its_plugin_does_not_import_torch():
    code = "import sys, kvbook, kvbook.diagnosis.pytest_plugin; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert [hasattr(kvbook, name) for name in ("check_step", "check_steps")] == [True, False]


def test_the_assertion_warns_in_16_bits_and_in_no_finer_dtype(recwarn):
    model = loading.load("llama", dtype="float32").model
    kvbook.assert_cache_matches(model)
    assert not [each for each in recwarn if "assert_cache_matches" in str(each.message)]
    with pytest.warns(UserWarning, match="in bfloat16 can pass a wrong cache"):
        kvbook.assert_cache_matches(model.bfloat16())
