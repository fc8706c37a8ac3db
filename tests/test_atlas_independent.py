"""The atlas, tried from outside: models by other rules, in a seeded order of the architectures.

``python tests/independent_atlas.py`` does the same for every architecture.
"""

import random
from contextlib import nullcontext

import independent_atlas
import pytest
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvreport.publishing import found

COUNT = 12
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tried():
    """Try architectures in a seeded order until a dozen are causal and were built."""
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    random.Random(24).shuffle(names)
    found = {}
    for name in names:
        if len(found) == COUNT:
            break
        try:
            one = independent_atlas.try_out(name)
        except independent_atlas.NotBuilt:
            continue
        if one["causal"] and len(one["tried"]) == len(independent_atlas.PATHS):
            found[name] = one
    return found


@pytest.fixture(scope="module")
def called():
    return dict(found.printed("atlas")["architectures"][["architecture", "verdict"]].to_numpy())


def test_no_architecture_of_a_seeded_dozen_differs_silently_under_row_invariance(tried):
    assert len(tried) == COUNT
    assert {name: one["silent"] for name, one in tried.items() if one["silent"]} == {}
    assert sum("exact" in one["outcomes"] for one in tried.values()) >= COUNT - 2, "refusing everything is no answer"


def test_none_of_them_that_is_clean_is_called_a_bug_and_none_that_is_wrong_is_called_clean(tried, called):
    assert {name for name, one in tried.items() if called[name] == "bug" and not one["wrong"]} == set()
    assert {name for name, one in tried.items() if called[name] in ("rounding", "exact") and one["wrong"]} == set()


@pytest.mark.parametrize("name", ["moshi", "mamba", "falcon_mamba", "git", "gpt_neo"])
def test_what_is_called_a_bug_is_wrong_here_too(name, called):
    assert called[name] == "bug"
    assert independent_atlas.try_out(name)["wrong"]


def test_control_a_cache_that_is_planted_wrong_is_found(monkeypatch):
    honest = DynamicLayer.update

    def update(self, keys, values, *arguments, **options):
        found = honest(self, keys, values, *arguments, **options)
        self.keys[:, :, 0] = 0
        return found

    monkeypatch.setattr(DynamicLayer, "update", update)
    assert independent_atlas.try_out("llama")["wrong"] == ["steps", "two parts"]


def test_control_stock_arithmetic_is_found_to_differ(monkeypatch):
    monkeypatch.setattr(independent_atlas, "row_invariant", nullcontext)
    assert independent_atlas.try_out("llama")["silent"]
