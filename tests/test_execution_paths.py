"""Every execution path finds the fault that its entry names, in every tool that tries it, and finds none without it."""

import numpy as np
import pytest
import torch
from small_models import small_mistral

import kvbook
from kvbook.atlas import columns, table
from kvbook.diagnosis import execution_paths, faults, outcome, probe, thorough, verdict
from kvbook.diagnosis.execution_paths import ATLAS, CHECK, LOOP, PATHS, THOROUGH, VERIFY
from kvbook.exact import verify

IDS = torch.arange(11, 11 + columns.LENGTH)[None]


def checked(model, name):
    generator = np.random.default_rng(0)
    return verdict.of_one(next(probe.readings(model, IDS, IDS, generator, (name,)))[0].drift, "float32").kind


def checked_thoroughly(model, name):
    path = thorough.paths_of(model.config, 128)[0][name]
    rows = thorough.rows_of(model, "float32", IDS[0].tolist(), {name: path}, lambda _n_tokens: None)
    (found,) = thorough.findings(list(rows))
    return found.detail if found.verdict == "not supported" else found.verdict


def surveyed(model, name):
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "ready", lambda *_: columns.look_at(model))
        patch.setattr(columns, "DTYPES", ("float32",))
        patch.setattr(execution_paths, "PATHS", [path for path in PATHS if path.name in (name, "left padding")])
        return table.judged({"status": "ran", "causal": True} | columns._as_it_is("mistral", "cpu"))[name]


def verified(model, name):
    found = [each for each in verify(model, IDS[:, :12]) if each.way.startswith(name)]
    return "bug" if all(each.equal_rows < each.rows for each in found) else "exact"


def looped(model, name):
    def step(ids, state):
        output = model(ids, past_key_values=state, use_cache=True)
        return output.logits, output.past_key_values

    return {found.path: found.verdict for found in kvbook.check_step(step, IDS[:, :12]).paths}[name]


TOOLS = {CHECK: checked, THOROUGH: checked_thoroughly, ATLAS: surveyed, VERIFY: verified, LOOP: looped}
PATHS_OF = thorough.paths_of(small_mistral().config, 128)[0]
FAR = {name: path for name, path in PATHS_OF.items() if path.n_tokens != execution_paths.SHORT}
CASES = [(tool, name, path) for tool in TOOLS for name, path in execution_paths.of(tool).items()]
CASES += [(THOROUGH, *item) for item in FAR.items()]
# What no path can be blamed for, and what this machine cannot do.
PADDING = {THOROUGH: outcome.PADDING_COUNTS, ATLAS: table.PADDING_CHANGES}
TWICE = ("prompt fed twice", "generate() feeds the whole prompt a second time: crop the cache by one token first")


@pytest.mark.parametrize(
    ("tool", "name", "path"),
    [case for case in CASES if torch.cuda.is_available() or "offloaded" not in case[2].name],
)
def test_a_path_is_sound_on_a_clean_model_and_a_bug_with_the_fault_that_is_its_control(tool, name, path):
    model = small_mistral()
    assert TOOLS[tool](model, name) in ("exact", "rounding", *TWICE)
    with getattr(faults, path.control)(model):
        assert TOOLS[tool](model, name) == (PADDING[tool] if path.name == "left padding" else "bug")


def test_every_path_has_a_control_a_remedy_and_a_name_of_its_own_in_each_tool_that_tries_it():
    assert all(path.remedy and callable(getattr(faults, path.control)) for path in PATHS)
    assert all((path.cut is None) != (path.feed is None) for path in PATHS)
    for tool in TOOLS:
        assert len(execution_paths.of(tool)) == sum(tool in path.tools for path in PATHS)
    assert {tool for path in PATHS for tool in path.tools} == set(TOOLS)


@pytest.mark.parametrize("cut", [execution_paths.chunks, execution_paths.thirds])
def test_the_parts_of_a_cut_make_up_the_text(cut):
    for length in range(3, 50):
        assert sum(cut(length)) == length
        assert min(cut(length)) > 0
