"""A default build can disagree with the book: what harms the model changes statements that are named here beforehand.

The experiment and the settings are those of a default build's chapter on which path is right, on fewer and shorter
texts, and the comparison is the one that the page shows.
"""

import pytest
import torch
from torch.nn import functional
from transformers import cache_utils

from kvbook import paths
from kvreport.chapters.which_path_is_right import path_errors
from kvreport.publishing import evaluated
from kvreport.running import planning

CHAPTER = "which_path_is_right"
FEW = {"n_samples": 4, "n_tokens": 12, "dtypes": ("float32", "bfloat16")}


def keys_in_8_bits(monkeypatch):
    stock = cache_utils.DynamicLayer.update

    def update(self, keys, values, *args, **options):
        scale = keys.abs().amax(-1, keepdim=True) / 127
        return stock(self, (keys / scale).round() * scale, values, *args, **options)

    monkeypatch.setattr(cache_utils.DynamicLayer, "update", update)


def sums_in_16_bits(monkeypatch):
    def forward(self, inputs):
        if inputs.dtype != torch.float32:
            return functional.linear(inputs, self.weight, self.bias)
        total = torch.zeros((), dtype=torch.bfloat16)
        for part, weight in zip(inputs.split(64, -1), self.weight.split(64, -1), strict=True):
            total = (total.float() + functional.linear(part, weight)).bfloat16()
        return total.float()

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)


def compared(monkeypatch, tmp_path):
    """Run the chapter's experiment as a default build does; return each statement's comparison with the book."""
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    (chapter,) = (one for one in planning.plan() if one.name == CHAPTER)
    settings = path_errors.EXPERIMENT.settings.checked(**chapter.values() | FEW)
    run = path_errors.EXPERIMENT.run(settings)
    folders = {path_errors.EXPERIMENT.name: str(run.folder.relative_to(tmp_path))}
    own = evaluated._own(CHAPTER, evaluated.published(CHAPTER), folders)
    return {name: one["comparison"] for name, one in own["statements"].items()}


@pytest.mark.slow
@pytest.mark.parametrize(("harm", "differ"), [
    (None, set()),
    (keys_in_8_bits, {"cached-no-worse", "reference-is-finer"}),
    (sums_in_16_bits, {"dtype-decides", "loading-in-fp64-is-not"}),
])
def test_harmed_arithmetic_changes_the_statements_named_and_sound_arithmetic_changes_none(
    harm, differ, monkeypatch, tmp_path, real_model
):
    if harm:
        harm(monkeypatch)
    found = compared(monkeypatch, tmp_path)
    assert {name for name, one in found.items() if one == "differs"} == differ
    assert sum(one == "agrees" for one in found.values()) >= (1 if harm else 3)
