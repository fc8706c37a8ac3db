"""The recipe, on a few steps of a shrunken model."""

import itertools
import json
import time

import baselines
import forked
import numpy as np
import pytest
import torch
import train_stand_ins as training
from transformers import AutoModelForMaskedLM

from kvbook import paths
from kvbook.models import corpus, standins

QUICK = training.Recipe(steps=6, tokens_per_step=64, short=16, long=32, warmup=2)


def test_a_batch_depends_on_the_seed_and_the_step_alone():
    stream = np.arange(1000)
    first, again = training.batch(stream, QUICK, 3, False), training.batch(stream, QUICK, 3, False)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], training.batch(stream, QUICK, 2, False)[0])


def looks_at(begin: bool, head: int, offset: int) -> float:
    """Give the attention that a fresh masked model's head pays to a neighbour, mean over its layers."""
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(standins.config("roberta"), attn_implementation="eager").eval()
    if begin:
        training._begin_masked(model)
    ids = torch.randint(20, 2000, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        layers = model(ids, output_attentions=True).attentions
    return float(np.mean([torch.diagonal(layer[0, head], offset).mean().item() for layer in layers]))


def test_a_masked_model_begins_with_a_head_for_each_neighbour():
    assert looks_at(True, 0, -1) > 0.15
    assert looks_at(True, 1, 1) > 0.15
    assert looks_at(True, 0, 1) < 0.02
    # The class's own beginning looks everywhere alike.
    assert looks_at(False, 0, -1) == pytest.approx(1 / 64, rel=0.1)


def test_masking_hides_what_is_to_be_predicted():
    ids = torch.randint(20, 2000, (64, 256), generator=torch.Generator().manual_seed(0))
    inputs, targets = training.mask_tokens(ids, 0.15, torch.Generator().manual_seed(1))
    chosen = targets != -100
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert torch.equal(targets[chosen], ids[chosen])
    masked = (inputs[chosen] == training.SPECIAL_TOKENS.index("<mask>")).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.03)


def test_the_learning_rate_warms_up_and_falls():
    recipe = training.Recipe()
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert rates[0] < rates[30] < max(rates) == pytest.approx(1)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def losses(folder):
    return [line.split(",")[1] for line in (folder / "training_log.csv").read_text().splitlines()[1:]]


@pytest.mark.slow
def test_a_killed_training_goes_on_and_ends_as_if_nothing_had_happened(tmp_path, monkeypatch):
    # On three files, of a small model: the recipe's own on its own corpus takes minutes to read and to score.
    recipe = training.Recipe(steps=8, tokens_per_step=64, short=16, long=32, warmup=2)
    files = corpus.stdlib_files
    monkeypatch.setattr(standins, "LAYERS", 2)
    monkeypatch.setattr(corpus, "stdlib_files", lambda part: itertools.islice(files(part), 3))

    def train(name):
        monkeypatch.setattr(training.training, "WORK", tmp_path / name / "training")
        training.train("gpt2", recipe, tmp_path / name / "model", every=2)

    def train_slowly():
        rate = training.Recipe.rate
        training.Recipe.rate = lambda self, step: time.sleep(0.5) or rate(self, step)
        train("killed")

    process = forked.start(train_slowly)
    while not list((tmp_path / "killed" / "training").glob("gpt2-*/step-4")):
        assert process.is_alive()
        time.sleep(0.05)
    process.kill()
    process.join()
    assert not (tmp_path / "killed" / "model").exists()
    steps = []
    with monkeypatch.context() as watched:
        rate = training.Recipe.rate
        watched.setattr(training.Recipe, "rate", lambda self, step: steps.append(step) or rate(self, step))
        train("killed")
    assert min(steps) >= 4, "it began anew"
    train("whole")
    assert losses(tmp_path / "killed" / "model") == losses(tmp_path / "whole" / "model")
    whole, killed = (
        json.loads((tmp_path / name / "model" / "training.json").read_text()) for name in ("whole", "killed")
    )
    assert killed["held_out_bits_per_byte"] == whole["held_out_bits_per_byte"]


class TestBaselines:
    def test_unigram_equals_what_one_computes_by_hand(self):
        found = baselines.unigram_nats(np.array([0, 0, 1]), np.array([0, 1]), 2)
        assert found == pytest.approx(-(np.log(3 / 5) + np.log(2 / 5)) / 2)

    def test_bigram_equals_what_one_computes_by_hand(self):
        # After 0 come 1, 1: T = 1, c = 2; unigram of 1 is (2 + 1) / (5 + 3).
        found = baselines.bigram_nats(np.array([0, 1, 0, 1, 2]), np.array([0, 1]), 3)
        assert found == pytest.approx(-np.log((2 + 1 * 3 / 8) / 3))

    def test_an_unseen_predecessor_falls_back_to_the_unigram(self):
        train = np.array([0, 0, 0])
        assert baselines.bigram_nats(train, np.array([1, 0]), 2) == pytest.approx(-np.log(4 / 5))

    def test_bits_per_byte_of_a_fair_coin_a_byte(self):
        assert training.training.bits_per_byte(np.log(2), 10, 10) == pytest.approx(1)

    def test_noise_does_not_compress(self):
        assert baselines.xz_bits_per_byte(np.random.default_rng(0).bytes(5000)) > 8
        assert baselines.xz_bits_per_byte(b"a" * 5000) < 0.5


def test_the_recipe_that_ships_is_the_recipe_that_is_recorded():
    for folder in paths.STANDINS.iterdir():
        if folder.is_dir():
            recorded = json.loads((folder / "training.json").read_text())["recipe"]
            assert training.Recipe(**recorded) == training.recipe_for(folder.name)
