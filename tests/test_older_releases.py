"""The check, a test's assertion, a loop's check and the switch on transformers 4.57.6, beside this environment's torch.

The environment is made once from the package index, some 20 MB, and kept in `_build`.
"""

import json
import subprocess
import sys

import pytest

from kvbook import paths, releases
from kvbook.exact import TRIED, NotInvariant, row_invariant, switch
from kvbook.runs import evidence, records

RELEASE = "4.57.6"
# Long enough for a download of 20 MB on a slow line.
SECONDS = 300

SCRIPT = """
import json, sys

import torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel

import kvbook
from kvbook.diagnosis import check
from kvbook.diagnosis.settings import CheckSettings
from kvbook.exact import row_invariant, verify

outcome = check.check(CheckSettings.checked(model="llama", n_samples=1, n_tokens=12, thorough=True))
small = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99)).eval().double()
kvbook.assert_cache_matches(small)
plain = small.transformer.h[1].attn.forward
small.transformer.h[1].attn.forward = lambda x, *given, **more: plain(
    x * (1 + x.shape[1] % 2), *given, **more
)
try:
    kvbook.assert_cache_matches(small)
    found = "nothing"
except AssertionError as error:
    found = str(error)
table = torch.randn(9, 9)

def step(ids, state):
    seen = ids if state is None else torch.cat([state, ids], 1)
    return table[seen].cumsum(1)[:, -ids.shape[1]:], seen

try:
    with row_invariant():
        refused = None
except Exception as error:
    refused = str(error)
print(json.dumps({
    "release": transformers.__version__, "verdict": outcome.verdict, "used": outcome.versions["transformers"],
    "paths": {path.path: path.verdict for path in outcome.paths}, "assertion": found,
    "loop": kvbook.check_step(step, [1, 2, 3, 4, 5, 6]).verdict, "refused": refused,
}))
"""


@pytest.fixture(scope="module")
def seen():
    made = releases.environment(RELEASE, paths.BUILD / "releases")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=releases.variables(made), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_an_older_release_is_checked_on_every_path(seen):
    assert seen["release"] == seen["used"] == RELEASE
    assert seen["verdict"] == "rounding"
    missing = {path for path, verdict in seen["paths"].items() if verdict == "not supported"}
    # On a CPU nothing is offloaded; and that release's generate() has nothing to feed on a full cache.
    assert missing == {
        "generate, offloaded cache", "generate, offloaded_static cache", "generate, cache as long as the prompt"
    }
    assert set(seen["paths"].values()) <= {"exact", "rounding", "not supported"}


@pytest.mark.slow
def test_an_older_release_has_the_assertion_and_the_check_of_a_loop(seen):
    assert seen["loop"] == "exact"
    assert "cached and full pass differ" in seen["assertion"], "the control: attention that depends on a part's length"


@pytest.mark.slow
def test_the_switch_refuses_an_older_release_by_name(seen):
    assert f"never tried on transformers {RELEASE}" in seen["refused"]


def test_the_releases_that_the_switch_was_tried_on_are_those_of_recorded_runs_of_the_atlas():
    recorded = [records.load(folder) for folder in evidence.folders("atlas")]
    assert all(any("row-invariant" in column for column in run.rows) for run in recorded)
    assert {run.about["machine"]["transformers"] for run in recorded} == set(TRIED)


def test_the_switch_refuses_a_release_that_was_never_tried(monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(switch, "TRIED", ("4.9.9",))
        with pytest.raises(NotInvariant, match=r"never tried on transformers .*: use 4\.9\.9, or .*untried=True"):
            row_invariant().__enter__()
        with row_invariant(untried=True):
            pass
    with row_invariant():
        pass
