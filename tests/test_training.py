"""Training: of the stand-ins, of the model from scratch, and the loop that both share."""

import itertools
import json
import os
import signal

import baselines
import forked
import numpy as np
import pandas as pd
import pytest
import torch
import train_stand_ins as stand_ins
from small_models import SCRATCH

from kvbook import paths
from kvbook.models import corpus, standins
from kvreport import training
from kvreport.chapters.from_scratch.gpt import checkpoints as scratch

QUICK = stand_ins.Recipe(steps=8, tokens_per_step=64, short=16, long=32, warmup=2)


@pytest.mark.parametrize(
    "batch",
    [lambda step: stand_ins.batch(np.arange(1000), QUICK, step, False),
     lambda step: scratch.batch(np.arange(1000), SCRATCH, step)],
    ids=["stand-in", "from scratch"],
)
def test_a_batch_depends_on_the_seed_and_the_step_alone(batch):
    assert all(torch.equal(one, again) for one, again in zip(batch(3), batch(3), strict=True))
    assert not torch.equal(batch(3)[0], batch(2)[0])


def test_masking_hides_what_is_to_be_predicted():
    ids = torch.randint(20, 2000, (64, 256), generator=torch.Generator().manual_seed(0))
    inputs, targets = stand_ins.mask_tokens(ids, 0.15, torch.Generator().manual_seed(1))
    chosen = targets != training.IGNORED
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert torch.equal(targets[chosen], ids[chosen])
    masked = (inputs[chosen] == stand_ins.SPECIAL_TOKENS.index("<mask>")).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stand-in", "from scratch"])
def test_a_killed_training_goes_on_and_ends_as_if_nothing_had_happened(tmp_path, monkeypatch, kind):
    # On three files, of a small model: the recipe's own on its own corpus takes minutes to read and to score.
    files = corpus.stdlib_files
    small = standins._FAMILIES["gpt2"]["config"] | {"n_layer": 1, "n_embd": 32}
    monkeypatch.setitem(standins._FAMILIES["gpt2"], "config", small)
    monkeypatch.setattr(corpus, "stdlib_files", lambda part: itertools.islice(files(part), 3))
    text = tmp_path / "code.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 7000)
    steps, run = [], training.run

    def train(name, dies_at=None):
        def watched(name, model, optimizers, recipe, rates, loss_of):
            def rates_there(step):
                if step == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                steps.append(step)
                return rates(step)

            return run(name, model, optimizers, recipe, rates_there, loss_of, every=2)

        steps.clear()
        monkeypatch.setattr(training, "run", watched)
        monkeypatch.setattr(training, "WORK", tmp_path / name / "training")
        if kind == "stand-in":
            return stand_ins.train("gpt2", QUICK, tmp_path / name / "model")
        return scratch.train(SCRATCH, tmp_path / name / "model", str(text))

    process = forked.start(lambda: train("killed", dies_at=5))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model").exists()
    killed = train("killed")
    assert steps == [4, 5, 6, 7], "it began anew"
    whole = train("whole")
    assert steps == list(range(8))
    losses = [pd.read_csv(folder / "training_log.csv")[["step", "loss_nats"]] for folder in (killed, whole)]
    pd.testing.assert_frame_equal(*losses)
    one, other = (json.loads((folder / "training.json").read_text()) for folder in (killed, whole))
    assert one | {"trained_s": 0} == other | {"trained_s": 0}
    weights = [(folder / "model.safetensors").read_bytes() for folder in (killed, whole)]
    assert weights[0] == weights[1]


def test_baselines_equal_what_one_computes_by_hand():
    found = baselines.unigram_nats(np.array([0, 0, 1]), np.array([0, 1]), 2)
    assert found == pytest.approx(-(np.log(3 / 5) + np.log(2 / 5)) / 2)
    # After 0 come 1, 1: T = 1, c = 2; unigram of 1 is (2 + 1) / (5 + 3).
    found = baselines.bigram_nats(np.array([0, 1, 0, 1, 2]), np.array([0, 1]), 3)
    assert found == pytest.approx(-np.log((2 + 1 * 3 / 8) / 3))
    # A predecessor that was never seen falls back to the unigram.
    assert baselines.bigram_nats(np.array([0, 0, 0]), np.array([1, 0]), 2) == pytest.approx(-np.log(4 / 5))


def test_bits_per_byte_are_known_of_a_fair_coin_and_of_noise():
    assert training.bits_per_byte(np.log(2), 10, 10) == pytest.approx(1)
    assert baselines.xz_bits_per_byte(np.random.default_rng(0).bytes(5000)) > 8
    assert baselines.xz_bits_per_byte(b"a" * 5000) < 0.5


@pytest.mark.parametrize("folder", [*paths.STANDINS.glob("*/"), *(paths.MODELS / "scratch").glob("*/")], ids=str)
def test_what_ships_was_made_by_the_recipe_that_stands_here_and_is_no_larger_than_it_may_be(folder):
    recorded = json.loads((folder / "training.json").read_text())["recipe"]
    if folder.name in scratch.RECIPES:
        assert scratch.Recipe(**recorded) == scratch.RECIPES[folder.name]
    else:
        assert stand_ins.Recipe(**recorded) == stand_ins.recipe_for(folder.name)
    assert (folder / "model.safetensors").stat().st_size <= {"small": 3e6, "thread": 25e6}.get(folder.name, 6e6)
