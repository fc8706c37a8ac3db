"""Of two passes that disagree the wrong one is named; where the evidence splits, neither is."""

import math

import pytest
import torch
from small_models import PLAIN, checkpoint, small_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbook.diagnosis import faults, wrong_pass

TEXTS = [torch.arange(start, start + 20)[None] for start in (11, 40)]


def hidden_without_a_cache(model):
    """Hide the first token from a pass without a cache, as a wrong full pass would."""

    def call(stock, ids, cache, options):
        if not options.get("use_cache"):
            options |= faults._seen(ids, 0, slice(0, 1))
        return stock(ids, past_key_values=cache, **options)

    return faults._calls(model, call)


@pytest.mark.parametrize(("fault", "said"), [
    (faults.offset_forgotten, wrong_pass.CACHED),
    (faults.mask_off_by_one, wrong_pass.CACHED),
    (hidden_without_a_cache, wrong_pass.UNCACHED),
])
def test_the_pass_that_is_wrong_is_named(fault, said):
    model = small_llama()
    with fault(model):
        assert wrong_pass.find(model, TEXTS)[0] == said


def test_control_passes_that_agree_blame_neither():
    assert wrong_pass.find(small_llama(), TEXTS) == (wrong_pass.UNTOLD, ["no evidence for either"])


def test_a_full_pass_that_is_not_causal_is_the_wrong_one(monkeypatch):
    monkeypatch.setattr(wrong_pass.reference_pass, "fault", lambda *_: wrong_pass.reference_pass.NOT_CAUSAL)
    assert wrong_pass.find(small_llama(), TEXTS)[0] == wrong_pass.UNCACHED


def test_evidence_that_splits_tells_neither(monkeypatch):
    model = small_llama()
    monkeypatch.setattr(wrong_pass.reference_pass, "fault", lambda *_: wrong_pass.reference_pass.NOT_CAUSAL)
    with faults.offset_forgotten(model):
        said, why = wrong_pass.find(model, TEXTS)
    assert (said, len(why)) == (wrong_pass.UNTOLD, 2)


@pytest.mark.parametrize(("cached", "uncached", "said"), [
    (2.0, 3.0, [wrong_pass.UNCACHED]), (3.0, 2.0, [wrong_pass.CACHED]), (2.0, 2.01, []),
    # As good as a blind guess among 320 tokens: the model has learnt nothing.
    (5.5, 7.0, []),
])
def test_a_trained_models_loss_tells_which_pass_reads_the_text_better(cached, uncached, said, monkeypatch):
    losses = iter([uncached, cached])
    monkeypatch.setattr(wrong_pass, "_loss", lambda *_: next(losses))
    assert [side for side, _ in wrong_pass._by_loss(wrong_pass.feeding.Fed(small_llama()), TEXTS)] == said


def test_the_loss_of_a_trained_model_is_lower_on_its_text_than_that_of_one_that_has_learnt_nothing(tmp_path):
    trained = AutoModelForCausalLM.from_pretrained(folder := checkpoint(PLAIN, tmp_path))
    ids = AutoTokenizer.from_pretrained(folder)("def add(first, second):\n    return first + second\n")["input_ids"]
    text = torch.tensor([ids])
    found = wrong_pass._loss([trained(text).logits], [text])
    assert found < wrong_pass._KNOWS * math.log(trained.config.vocab_size)
    assert found < wrong_pass._loss([torch.zeros(1, len(ids), trained.config.vocab_size)], [text])
