"""The files by which others get the library: metadata, the action, the workflow that publishes."""

import re
import tomllib

import yaml

from kvbook import __version__, paths
from kvbook.__main__ import app
from kvbook.paths import ROOT
from kvreport.site import running

ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
RELEASE = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
PROJECTS = ("pyproject.toml", "src/kvreport/pyproject.toml")
EXAMPLE = yaml.safe_load((ROOT / "examples" / "kvbook-check.yml").read_text("utf-8"))


def test_the_action_only_uses_options_that_the_check_has():
    commands = " ".join(step["run"] for step in ACTION["runs"]["steps"])
    (check,) = (each for each in app.registered_commands if each.callback.__name__ == "check")
    options = {f"--{name.replace('_', '-')}" for name in check.callback.__annotations__}
    assert set(re.findall(r"--[a-z-]+", commands)) <= options
    assert "--junit" in commands


def test_what_a_user_gives_the_action_reaches_the_shell_as_variables_alone():
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"], step


def test_the_example_gives_the_action_only_inputs_that_it_has():
    (step,) = (each for each in EXAMPLE["jobs"]["cache"]["steps"] if each["uses"].startswith("OWNER/"))
    assert set(step["with"]) <= set(ACTION["inputs"])


def test_what_publishes_comes_after_the_release_and_keeps_no_token():
    assert "password" not in str(RELEASE["jobs"]["publish"])
    assert RELEASE["jobs"]["publish"]["needs"] == "release"


def test_each_action_of_the_example_is_pinned_by_a_commit():
    for step in (step for job in EXAMPLE["jobs"].values() for step in job["steps"] if "uses" in step):
        assert re.search(r"@([0-9a-f]{40}|COMMIT)$", step["uses"]), step


def test_classifiers_name_the_pythons_that_the_versions_workflow_tries():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = {each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)}
    tried = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text("utf-8"))
    assert named == set(tried["jobs"]["check"]["strategy"]["matrix"]["python"])
    assert {"gguf", "plot", "quantization"} <= set(project["optional-dependencies"])


def test_both_packages_and_the_citation_name_one_version():
    projects = (tomllib.loads((ROOT / file).read_text("utf-8"))["project"] for file in PROJECTS)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"]
    assert {cited, *(project["version"] for project in projects)} == {__version__}


def test_the_page_and_its_cells_for_colab_give_the_address_that_the_citation_file_names(tmp_path, monkeypatch):
    about = (ROOT / "CITATION.cff").read_text("utf-8")
    (tmp_path / "CITATION.cff").write_text(f"{about}repository-code: https://github.com/somebody/book.git\n")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    text, line, cells = running.install(), running.install_line(), running.colab()
    assert "!git clone -q https://github.com/somebody/book kv-cache-book" in cells
    assert "rocket" in cells
    assert line == "```text\npip install 'kvbook @ git+https://github.com/somebody/book'\n```"
    assert line.splitlines()[1] in text
    assert "uvx --from 'kvbook @ git+https://github.com/somebody/book' kvbook" in text


def test_a_book_without_an_address_is_installed_from_its_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    (tmp_path / "CITATION.cff").write_text((ROOT / "CITATION.cff").read_text("utf-8"))
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert running.install_line().splitlines()[1].startswith("pip install .")
    assert running.install().splitlines()[1:-1] == ["pip install .", "uvx --from . kvbook check MODEL"]


BLOCKS = re.compile(r"^```(?:python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def without_the_line(text):
    """Return the parts of a page, its doors or itself, that give `kvbook` to copy without the line that installs it."""
    doors = re.findall(r"^::::\{dropdown\}.*?^::::$", text, re.MULTILINE | re.DOTALL) or [text]
    examples = {path.stem: path.read_text("utf-8") for path in (ROOT / "examples/howto").glob("*.py")}
    copied = {
        door: "\n".join([*BLOCKS.findall(door), *(examples[name] for name in re.findall(r"howto/(\w+)\.py", door))])
        for door in doors
    }
    return [door for door, code in copied.items() if "kvbook" in code and "<!-- part: install line -->" not in door]


def test_each_door_and_how_to_that_uses_the_package_has_the_line_that_installs_it():
    pages = [ROOT / "index.md", *(ROOT / "pages/howto").glob("*.md")]
    used = {path.stem for path in pages if "<!-- part: install line -->" in path.read_text("utf-8")}
    assert {"index", "server", "trainer_and_rollout", "bit_reproducible"} <= used
    for path in pages:
        assert without_the_line(path.read_text("utf-8")) == [], path.name
    # Control.
    page = (ROOT / "pages/howto/server.md").read_text("utf-8")
    assert without_the_line(page.replace("<!-- part: install line -->", ""))


def test_nowhere_is_the_package_asked_of_an_index():
    for path in [*(ROOT / "pages").rglob("*.md"), *(ROOT / "src").rglob("*.py"), ROOT / "index.md", ROOT / "README.md"]:
        assert not re.search(r"pip install '?kvbook(?! @)", path.read_text("utf-8")), path
