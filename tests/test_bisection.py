"""A fault's first and last release, and its first commit, are found by few trials."""

import json
import subprocess
from pathlib import Path

import pytest

from kvbook import bisection, releases
from kvbook.errors import UserError

POINTS = [f"5.{minor}.0" for minor in range(12)]


def at_fault(*minors):
    """Return an outcome that is wrong in these minor releases, and the list of what was asked."""
    asked = []

    def outcome(release):
        asked.append(release)
        return "bug" if int(release.split(".")[1]) in minors else "rounding"

    return outcome, asked


@pytest.mark.parametrize(("minors", "found"), [
    (range(3, 8), ("5.2.0", "5.3.0", "5.7.0", "5.8.0")),
    (range(5), (None, "5.0.0", "5.4.0", "5.5.0")),
    (range(9, 12), ("5.8.0", "5.9.0", "5.11.0", None)),
    ([6], ("5.5.0", "5.6.0", "5.6.0", "5.7.0")),
])
def test_the_first_and_the_last_release_with_a_fault_are_found(minors, found):
    assert bisection.span(POINTS, at_fault(*minors)[0]) == bisection.Span(*found)


def test_a_release_that_is_known_to_have_it_saves_the_search_and_none_is_tried_twice():
    outcome, asked = at_fault(6)
    bisection.span(POINTS, outcome, "5.6.0")
    assert asked[0] == "5.6.0"
    assert len(asked) == len(set(asked)) < len(POINTS)


def test_a_fault_that_no_release_has_is_refused_after_all_were_tried():
    outcome, asked = at_fault()
    with pytest.raises(UserError, match=r"not wrong in 5\.0\.0, .*: name a release with --has"):
        bisection.span(POINTS, outcome)
    assert sorted(asked) == sorted(POINTS)


def test_a_point_that_does_not_run_is_passed_over_and_counts_neither_as_sound_nor_as_wrong():
    def outcome(release):
        minor = int(release.split(".")[1])
        return "ValueError: no" if minor in (1, 2, 3, 4, 8) else "bug" if minor in (5, 6, 7) else "exact"

    assert bisection.span(POINTS, outcome, "5.6.0") == bisection.Span("5.0.0", "5.5.0", "5.7.0", "5.9.0")


def test_places_are_halved_from_the_newest_on():
    assert bisection.halving(5) == [4, 0, 2, 1, 3]
    assert all(sorted(bisection.halving(count)) == list(range(count)) for count in range(2, 30))


def test_the_last_patch_of_each_minor_release_counts_from_the_oldest_that_runs():
    versions = ["5.10.4", "5.10.2", "5.9.0", "5.1.0rc1", "4.50.3", "4.50.1", "4.49.0"]
    assert bisection.last_patches(versions) == ["4.50.3", "5.9.0", "5.10.4"]


def test_a_path_that_the_atlas_lacks_is_refused_with_those_it_has():
    with pytest.raises(UserError, match=r"no path 'chunk': choose one of token by token, chunks"):
        bisection.check_path("chunk")


@pytest.mark.parametrize(("row", "said"), [
    ({"status": "ran", "causal": True, "chunks, drift": {"float64": [1.0]}}, "bug"),
    ({"status": "ran", "causal": True, "chunks, drift": {"float64": [1e-15]}}, "rounding"),
    ({"status": "fails", "reason": "ImportError: no"}, "ImportError: no"),
    (None, "not there"),
])
def test_a_releases_outcome_is_its_rows_and_its_environment_is_removed(row, said, tmp_path, monkeypatch):
    def run(_made, arguments, quiet):
        if row:
            Path(arguments[arguments.index("--rows") + 1]).write_text(json.dumps(row) + "\n")

    monkeypatch.setattr(releases, "environment", lambda *_: (tmp_path / "made").mkdir() or tmp_path / "made")
    monkeypatch.setattr(releases, "run", run)
    assert bisection.of_release("llama", "chunks", tmp_path)("5.0.0") == said
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


def test_the_first_commit_with_a_fault_is_found_in_work_trees_that_are_removed(clone):
    def outcome(tree):
        return "bug" if (Path(tree) / "src/transformers/cache.py").read_text() >= "STATE = 2" else "rounding"

    listed = bisection.commits(clone, "5.0.0", "5.3.0")
    assert len(listed) == 4
    found = bisection.span(listed, bisection.of_commit(clone, outcome), listed[-1])
    assert (found.before, found.first) == (listed[1], listed[2])
    trees = subprocess.run(["git", "-C", str(clone), "worktree", "list"], capture_output=True, text=True).stdout
    assert len(trees.splitlines()) == 1


def test_a_release_whose_tag_a_clone_lacks_is_one_line(clone):
    with pytest.raises(UserError, match="git cannot rev-parse in"):
        bisection.commits(clone, "5.1.0", "5.3.0")
