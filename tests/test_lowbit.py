"""Weights in 8 and 4 bits, on small checkpoints of the families that the document blog-past quantized."""

import logging
import sys

import pytest
import torch
from refusing import refusal
from transformers import AutoModelForCausalLM

from kvbook.models import loading, lowbit, standins

IDS = torch.arange(20, 60)[None]


@pytest.fixture
def load(family_folders):
    def loaded(family="gpt2", **options):
        return loading.load(str(family_folders[family]), **options)

    return loaded


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits.float()


@pytest.mark.parametrize("family", ["gpt2", "mpt", "falcon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fewer_bits_give_other_logits_near_the_right_ones_and_4_bits_err_more_than_8(load, family, dtype):
    right, errors = logits(load(family).model), {}
    for quantization in ("8bit", "4bit"):
        loaded = load(family, dtype=dtype, quantization=quantization)
        assert (loaded.quantization, loaded.dtype) == (quantization, dtype)
        errors[quantization] = ((logits(loaded.model) - right).norm() / right.norm()).item()
    assert 0 < errors["8bit"] < 0.1
    assert errors["8bit"] < errors["4bit"] < 0.5


@pytest.mark.parametrize("family", standins.FAMILIES)
@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_the_predicted_bytes_are_those_that_the_weights_take(load, family, quantization):
    model = load(family, dtype="float16", quantization=quantization).model
    states = (getattr(p, "quant_state", None) for p in model.parameters())
    taken = sum(p.nbytes for p in model.parameters()) + sum(4 * state.absmax.numel() for state in states if state)
    # 8 bits: the scales of the rows, which the prediction leaves out, are 4 bytes for 128 or more.
    shape = loading.shape(model.config)
    predicted, in_full = (lowbit.bytes_needed(shape, of, torch.float16) for of in (quantization, "none"))
    assert predicted == pytest.approx(taken, rel=0.03)
    assert predicted < 0.8 * in_full


def test_random_weights_can_be_quantized_too(load):
    drawn, quantized = (logits(load("mpt", weights="random", quantization=of).model) for of in ("none", "8bit"))
    assert 0 < (quantized - drawn).norm() / drawn.norm() < 0.1


def test_control_transformers_alone_leaves_falcon_as_it_is_and_that_is_refused(load, family_folders):
    options = lowbit.options("4bit", torch.float32)
    left = AutoModelForCausalLM.from_pretrained(family_folders["falcon"], device_map={"": "cpu"}, **options)
    assert torch.equal(logits(left), logits(load("falcon").model))
    assert "8 linear layers were not quantized" in refusal(lowbit.refuse_untouched, left, "falcon", "4bit")


def test_the_record_says_the_quantization_and_its_library(family_folders):
    about = loading.identify(str(family_folders["gpt2"]), quantization="4bit")
    assert (about["quantization"], about["bitsandbytes"]) == ("4bit", "0.50.2")
    assert "quantization" not in loading.identify(str(family_folders["gpt2"]))


def test_bitsandbytes_remarks_are_kept_out_of_pages(load, caplog):
    model = load(quantization="8bit").model
    caplog.clear()
    logits(model)
    assert caplog.records == []
    logging.getLogger("bitsandbytes").setLevel(logging.WARNING)
    logits(model)
    assert "inputs will be cast" in caplog.text, "the control: without us, a line a layer"


@pytest.mark.parametrize("library", ["bitsandbytes", "accelerate"])
def test_a_missing_library_is_one_line_that_names_it(load, monkeypatch, library):
    # As the import system notes a module that is not to be found.
    monkeypatch.setitem(sys.modules, library, None)
    assert f"takes {library}: pip install" in refusal(load, quantization="8bit")
    load()


def test_an_unknown_quantization_and_a_dtype_that_has_none_are_refused(load):
    assert "quantization '2bit' is unknown: use 'none', '8bit', '4bit'" in refusal(load, quantization="2bit")
    assert "takes float32, float16 or bfloat16, not float64" in refusal(load, quantization="4bit", dtype="float64")
