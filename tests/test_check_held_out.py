"""`kvbook check` by default, on architectures for which its rule was not made: no false alarm, no missed fault."""

import functools
import inspect

import pytest
from small_models import asked

from kvbook.atlas import configurations
from kvbook.diagnosis import check, faults, outcome, wrong_pass

# None of them is a family of this book: other norms, windows, chunks, experts, biases, latent attention.
HELD_OUT = "gemma3_text phi3 gpt_neox opt bloom cohere2 mixtral gpt_oss deepseek_v3 llama4_text"
INJECTED = ("position offset forgotten", "mask off by one", "K/V one step late", "cache kept in 16 bits")


@pytest.fixture(scope="module")
def saved(save):
    """Return a function that saves a tiny model of an architecture with a tokenizer."""
    return functools.cache(lambda name: save(configurations.build(name), name))


@pytest.fixture(params=HELD_OUT.split())
def folder(request, saved):
    return saved(request.param)


def test_a_clean_architecture_gives_no_false_alarm_and_is_decided(folder, text_folder):
    found = check.check(asked(folder, text_folder))
    assert found.status == outcome.SOUND, found.lines
    assert len(found.drift) == 2


@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_fault_is_found(folder, text_folder, injected, monkeypatch, name):
    # What is told beside a verdict, and does not change it, takes as long as all else; other files have its tests.
    monkeypatch.setattr(check._Measured, "_wrong_pass", lambda *_: wrong_pass.UNTOLD)
    monkeypatch.setattr(check._Measured, "_moves", lambda *_: [])

    def inject(model):
        # Without positions to count, or with some of its own, a class cannot have that fault.
        lacks = name.startswith("position") and "position_ids" not in inspect.signature(model.forward).parameters
        return faults.one_step_late(model) if lacks else faults.FAULTS[name].inject(model)

    injected(inject)
    found = check.check(asked(folder, text_folder, n_tokens=8))
    assert found.status == outcome.BUG, found.lines


@pytest.mark.parametrize("name", ["gemma3n_text", "hy_v4", "inkling_text"])
def test_unusual_classes_are_decided_in_fp64(name, saved, text_folder):
    # Several residual streams, before or after the texts; experts whose grouped product has no fp64; a configuration
    # without use_cache.
    found = check.check(asked(saved(name), text_folder))
    assert found.status == outcome.SOUND, found.lines
    assert "float64" in found.why
    grouped = [each for each in found.not_tried if each.startswith("the grouped product of experts")]
    assert len(grouped) == (name != "gemma3n_text")


def test_tables_that_a_checkpoint_holds_in_fp32_are_no_bug_in_fp64(saved, text_folder):
    found = check.check(asked(saved("minimax"), text_folder))
    assert (found.status, list(found.left_out)) == (outcome.SOUND, ["float64"])


def test_a_small_bug_of_a_mixture_of_experts_is_found_in_fp64(saved, text_folder):
    # data/upstream/zamba2_time_steps.py: too small a difference for fp32.
    found = check.check(asked(saved("nemotron_h"), text_folder, n_tokens=24))
    assert (found.status, len(found.drift)) == (outcome.BUG, 2)
