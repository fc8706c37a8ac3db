"""The check, a test's assertion, a loop's check and the switch on transformers 4.57.6, beside this environment's torch.

The environment is made from the package index, some 20 MB, once for all tests of this file.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusing import refusal

from kvbook import paths, releases
from kvbook.exact import TRIED, NotInvariant, row_invariant, switch
from kvbook.runs import evidence, records

RELEASE = "4.57.6"

SCRIPT = """
import json, sys

import pytest, torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel

import kvbook
from kvbook.diagnosis import CheckSettings, check
from kvbook.exact import NotInvariant, row_invariant, verify

outcome = check.check(CheckSettings.checked(model=sys.argv[1], n_samples=1, n_tokens=12, thorough=True))
small = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99)).eval().double()
kvbook.assert_cache_matches(small)
plain = small.transformer.h[1].attn.forward
small.transformer.h[1].attn.forward = lambda x, *given, **more: plain(x * (1 + x.shape[1] % 2), *given, **more)
with pytest.raises(AssertionError) as found:
    kvbook.assert_cache_matches(small)
table = torch.randn(9, 9)

def step(ids, state):
    seen = ids if state is None else torch.cat([state, ids], 1)
    return table[seen].cumsum(1)[:, -ids.shape[1]:], seen

with pytest.raises(NotInvariant) as refused:
    row_invariant().__enter__()
print(json.dumps({
    "release": transformers.__version__, "verdict": outcome.verdict, "used": outcome.versions["transformers"],
    "paths": {path.path: path.verdict for path in outcome.paths}, "assertion": str(found.value),
    "loop": kvbook.check_step(step, [1, 2, 3, 4, 5, 6]).verdict, "refused": str(refused.value),
}))
"""


@pytest.fixture(scope="module")
def seen(llama_folder):
    made = releases.environment(RELEASE, paths.BUILD / "releases")
    # Long enough for a download of 20 MB on a slow line.
    command = [sys.executable, "-c", SCRIPT, str(llama_folder)]
    done = subprocess.run(command, env=releases.variables(made), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (made / "transformers").is_dir()
    assert not (made / "torch").exists(), "the running environment's serves"
    return json.loads(done.stdout.splitlines()[-1])


def test_an_older_release_is_checked_on_every_path(seen):
    assert seen["release"] == seen["used"] == RELEASE
    assert seen["verdict"] == "rounding"
    missing = {path for path, verdict in seen["paths"].items() if verdict == "not supported"}
    # On a CPU nothing is offloaded; and that release's generate() has nothing to feed on a full cache.
    caches = ("offloaded cache", "offloaded_static cache", "cache as long as the prompt")
    assert missing == {f"generate, {cache}" for cache in caches}
    assert set(seen["paths"].values()) <= {"exact", "rounding", "not supported"}


def test_an_older_release_has_the_assertion_and_the_check_of_a_loop_and_the_switch_refuses_it_by_name(seen):
    assert seen["loop"] == "exact"
    assert "cached and full pass differ" in seen["assertion"], "the control: attention that depends on a part's length"
    assert f"never tried on transformers {RELEASE}" in seen["refused"]


def test_the_releases_that_the_switch_was_tried_on_are_those_of_recorded_runs_of_the_atlas():
    recorded = [records.load(folder) for folder in evidence.folders("atlas")]
    assert all(any("row-invariant" in column for column in run.rows) for run in recorded)
    assert {run.about["machine"]["transformers"] for run in recorded} == set(TRIED)


def test_the_switch_refuses_a_release_that_was_never_tried(monkeypatch):
    with row_invariant():
        pass
    monkeypatch.setattr(switch, "TRIED", ("4.9.9",))
    with pytest.raises(NotInvariant, match=r"never tried on transformers .*: use 4\.9\.9, or .*untried=True"):
        row_invariant().__enter__()
    with row_invariant(untried=True):
        pass


# Their environments.

def test_an_environment_is_made_once_of_a_release_and_what_pip_says_that_the_running_one_lacks(tmp_path, monkeypatch):
    named = [("transformers", "5.5.4", True), ("tokenizers", "1.0", False)]
    planned = [{"metadata": {"name": name, "version": v}, "requested": asked} for name, v, asked in named]
    installed = []

    def run(command, **_):
        if "--target" in command:
            made, *packages = command[command.index("--target") + 1 :]
            Path(made).mkdir()
            installed.extend(packages)
        return subprocess.CompletedProcess(command, 0, json.dumps({"install": planned}), "")

    monkeypatch.setattr(releases.subprocess, "run", run)
    assert releases.environment("5.5.4", tmp_path) == releases.environment("5.5.4", tmp_path)
    assert installed == ["tokenizers==1.0", "transformers==5.5.4"]


def test_an_installation_that_fails_leaves_nothing_and_says_so_in_one_line(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "warning\nERROR: No matching distribution found\n")
    monkeypatch.setattr(releases.subprocess, "run", lambda *_, **__: failed)
    said = refusal(releases.environment, "5.99.0", tmp_path)
    assert said.startswith("cannot install transformers==5.99.0: ERROR: No matching")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", ["latest", "5", "../elsewhere", "5.5.4; rm"])
def test_what_is_no_release_and_no_checkout_is_refused(asked, tmp_path):
    assert "neither a release" in refusal(releases.environment, asked, tmp_path)


@pytest.mark.parametrize(("options", "status", "stays"), [([], 0, False), (["--keep"], 0, True), ([], 130, True)])
def test_the_atlas_removes_an_environment_unless_kept(options, status, stays, tmp_path, monkeypatch, kvbook_here):
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(releases, "environment", lambda *_: made)
    monkeypatch.setattr(releases, "run", lambda *_: status)
    assert kvbook_here("atlas", "--transformers", "5.5.4", *options).returncode == status
    assert made.exists() == stays


@pytest.mark.slow
def test_a_release_that_cannot_be_imported_is_one_line(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('too old')")
    assert "cannot be imported here: ImportError: too old" in refusal(releases.run, tmp_path, ["atlas"])


# A fault's first and last release, and its first commit, are found by few trials.

POINTS = [f"5.{minor}.0" for minor in range(12)]


def tried(wrong, do_not_run=()):
    """Return what tells of a release whether a path is wrong there, and the list of those that it was asked."""
    asked = []

    def outcome(release):
        asked.append(release)
        minor = POINTS.index(release)
        return "ValueError: no" if minor in do_not_run else "bug" if minor in wrong else "rounding"

    return outcome, asked


# Points that do not run are passed over, and count neither as sound nor as wrong.
@pytest.mark.parametrize(("wrong", "do_not_run", "has", "found"), [
    (range(3, 8), (), None, ("5.2.0", "5.3.0", "5.7.0", "5.8.0")),
    (range(5), (), None, (None, "5.0.0", "5.4.0", "5.5.0")),
    (range(9, 12), (), None, ("5.8.0", "5.9.0", "5.11.0", None)),
    ([6], (), "5.6.0", ("5.5.0", "5.6.0", "5.6.0", "5.7.0")),
    ([5, 6, 7], (1, 2, 3, 4, 8), "5.6.0", ("5.0.0", "5.5.0", "5.7.0", "5.9.0")),
])
def test_the_first_and_the_last_release_with_a_fault_are_found_and_none_is_tried_twice(wrong, do_not_run, has, found):
    outcome, asked = tried(wrong, do_not_run)
    assert releases.span(POINTS, outcome, has) == releases.Span(*found)
    assert asked[0] == (has or "5.11.0"), "without a release that has it, the newest is the first that is tried"
    assert len(asked) == len(set(asked))


def test_a_fault_is_looked_for_in_halves_and_one_that_no_release_has_is_refused_after_all_were_tried():
    outcome, asked = tried(())
    assert re.search(r"not wrong in 5\.0\.0, .*: name a release with --has", refusal(releases.span, POINTS, outcome))
    assert asked[:5] == ["5.11.0", "5.0.0", "5.5.0", "5.2.0", "5.8.0"]
    assert sorted(asked) == sorted(POINTS)


def test_the_last_patch_of_each_minor_release_counts_from_the_oldest_that_runs():
    versions = ["5.10.4", "5.10.2", "5.9.0", "5.1.0rc1", "4.50.3", "4.50.1", "4.49.0"]
    assert releases.last_patches(versions) == ["4.50.3", "5.9.0", "5.10.4"]


def test_a_path_that_the_atlas_lacks_is_refused_with_those_it_has():
    assert "no path 'chunk': choose one of token by token, chunks" in refusal(releases.check_path, "chunk")


@pytest.mark.parametrize(("row", "said"), [
    ({"status": "ran", "causal": True, "chunks, drift": {"float64": [1.0]}}, "bug"),
    ({"status": "ran", "causal": True, "chunks, drift": {"float64": [1e-15]}}, "rounding"),
    ({"status": "fails", "reason": "ImportError: no"}, "ImportError: no"), (None, "not there"),
])
def test_a_releases_outcome_is_its_rows_and_its_environment_is_removed(row, said, tmp_path, monkeypatch):
    def run(_made, arguments, quiet):
        if row:
            Path(arguments[arguments.index("--rows") + 1]).write_text(json.dumps(row) + "\n")

    monkeypatch.setattr(releases, "environment", lambda *_: (tmp_path / "made").mkdir() or tmp_path / "made")
    monkeypatch.setattr(releases, "run", run)
    assert releases.of_release("llama", "chunks", tmp_path)("5.0.0") == said
    assert not (tmp_path / "made").exists()


@pytest.fixture
def clone(tmp_path):
    """A repository with two tagged releases and three commits between them, the second of which brings a fault."""
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "src" / "transformers").mkdir(parents=True)
    for number in range(4):
        (tmp_path / "src" / "transformers" / "cache.py").write_text(f"STATE = {number}\n")
        git("add", "-A")
        git("commit", "-qm", f"state {number}")
        if number in (0, 3):
            git("tag", f"v5.{number}.0")
    return tmp_path


def test_a_checkout_with_uncommitted_changes_is_refused(clone):
    (clone / "src" / "transformers" / "cache.py").write_text("STATE = 9\n")
    assert "has changes beside its commit: commit them first" in refusal(releases.environment, str(clone), clone)


def test_the_first_commit_with_a_fault_is_found_in_work_trees_that_are_removed(clone):
    def outcome(tree):
        return "bug" if (Path(tree) / "src/transformers/cache.py").read_text() >= "STATE = 2" else "rounding"

    listed = releases.commits(clone, "5.0.0", "5.3.0")
    assert len(listed) == 4
    found = releases.span(listed, releases.of_commit(clone, outcome), listed[-1])
    assert (found.before, found.first) == (listed[1], listed[2])
    trees = subprocess.run(["git", "-C", str(clone), "worktree", "list"], capture_output=True, text=True).stdout
    assert len(trees.splitlines()) == 1


def test_a_release_whose_tag_a_clone_lacks_is_one_line(clone):
    assert "git cannot rev-parse in" in refusal(releases.commits, clone, "5.1.0", "5.3.0")
