"""The atlas, tried from outside: models by other rules, in a seeded order of the architectures."""

import os
import random
from contextlib import nullcontext, suppress

import independent_atlas
import pytest
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvreport.publishing import found

# All architectures, or a seeded dozen of those that run.
COUNT = None if os.environ.get("KVBOOK_ALL_ARCHITECTURES") else 12
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tried():
    """Try architectures in a seeded order until a dozen are causal and were fed on every path."""
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    random.Random(24).shuffle(names)
    found = {}
    for name in names:
        if len(found) == COUNT:
            break
        with suppress(independent_atlas.NotBuilt):
            one = independent_atlas.try_out(name)
            if one["causal"] and (COUNT is None or is_whole(one)):
                found[name] = one | independent_atlas.under_the_switch(name, one)
    return found


def is_whole(one) -> bool:
    return len(one["tried"]) == len(independent_atlas.PATHS)


@pytest.fixture(scope="module")
def called():
    return dict(found.printed("atlas")["architectures"][["architecture", "verdict"]].to_numpy())


def test_no_architecture_of_a_seeded_dozen_differs_silently_under_row_invariance(tried):
    assert len(tried) == COUNT or len(tried) >= 120
    assert {name: one["silent"] for name, one in tried.items() if one["silent"]} == {}
    assert sum(one["compared"] > 0 for one in tried.values()) >= 10, "refusing everything is no answer"


def test_none_of_them_that_is_clean_is_called_a_bug_and_none_that_is_wrong_is_called_clean(tried, called):
    # Where a cached path could not be tried, nothing contradicts a verdict on it.
    clean, wrong = ({name for name, one in tried.items() if bool(one["wrong"]) is of} for of in (False, True))
    assert {name for name in clean if called[name] == "bug" and is_whole(tried[name])} == set()
    assert {name for name in wrong if called[name] in ("rounding", "exact")} == set()


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
    assert independent_atlas.under_the_switch("llama", independent_atlas.try_out("llama"))["silent"]
