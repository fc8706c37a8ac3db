"""What must never happen: a published secret, a file's code run, a page that obeys a model, a write elsewhere."""

import ast
import json
import re
from pathlib import Path

import mini_book
import pytest
import yaml
from bs4 import BeautifulSoup
from refusing import refusal
from test_execution import execute, only_chapter

from kvbook import paths
from kvbook.paths import ROOT
from kvreport.publishing import page as publish
from kvreport.running import planning

# Canaries: values that look like what they stand for and lead nowhere.
CANARIES = {
    "HF_TOKEN": "hf_CanaryCanaryCanaryCanary0001", "AWS_SECRET_ACCESS_KEY": "canary/secret+access0002",
    "AWS_ACCESS_KEY_ID": "AKIACANARY00000000A3", "AWS_SESSION_TOKEN": "canary-session-0004-canary",
    "DATABASE_URL": "postgresql://jo:canary-password-0005@db.example.org/x",
}


def leaks(folder: Path) -> list[str]:
    """List the files that hold a canary, in whole or by its telling part."""
    telling = [*CANARIES.values(), "canary-password-0005", "CanaryCanary", "AKIACANARY"]
    contents = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return [f"{file}: {value}" for file, content in contents.items() for value in telling if value.encode() in content]


@pytest.fixture
def book(tmp_path):
    return mini_book.create(tmp_path / "book")


HOSTILE = (
    '<script>alert(1)</script><img src=x onerror=alert(2)> <iframe src="//evil"></iframe> '
    "[a](javascript:alert(3)) [b](javascript:alert(4)){.external} "
    "<!-- gone --> &lt;b&gt;"
)
BLOCKS = "one\n\n```{include} ../parameters/few.yaml\n```\n\n```{raw} html\n<b id=raw></b>\n```"
FENCES = (
    "```{include} ../parameters/few.yaml", ":::{include} ../parameters/few.yaml", "~~~{raw} html", "   ```{raw} html"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A book whose chapter records a run and shows hostile text, made where there are secrets; and what that said."""
    root = mini_book.create(tmp_path_factory.mktemp("made") / "book")
    measured = (
        "from kvbook.runs import machine, records\n"
        "made_of = {'settings': {}, 'source': '0' * 64, 'machine': machine.describe('cpu')}\n"
        "records.run('cheap', made_of, lambda w: w.append('u', [{'x': 1}]), note={'commit': machine.commit()})\n"
    )
    table = (
        f"rows['text'] = {HOSTILE!r}\nrows['quoted'] = {HOSTILE + BLOCKS!r}\nrows['blocks'] = {BLOCKS!r}\n"
        f"rows['fence'] = {FENCES!r}\n"
        f"page.table(rows, 'tab-squares', literal=['quoted'])\n"
    )
    mini_book.write(root, run=mini_book.CODE["run"] + measured, table=table, last=f"print({HOSTILE!r})\n")
    return root, mini_book.make_book(root, **CANARIES)


# Secrets


@pytest.mark.slow
def test_no_secret_of_the_environment_reaches_a_notebook_a_record_a_figure_a_page_or_a_log(made):
    book, done = made
    assert done.returncode == 0, done.stdout
    for kind in ("executed/*.ipynb", "runs/*/*/run.json", "figures/*/*.svg", "html/chapters/*.html"):
        assert list((book / "_build").glob(kind)), kind
    assert leaks(book / "_build") == []
    assert not any(value in done.stdout for value in CANARIES.values())


@pytest.mark.parametrize(("cell", "code", "said"), [
    ("last", "print(dict(os.environ))", "would publish"),
    ("table", "rows['z'] = os.environ['DATABASE_URL']\npage.table(rows, 'tab-squares')", "would publish"),
    ("table", "print(os.environ['HF_TOKEN'])\nraise OSError(os.environ['DATABASE_URL'])", "secret removed"),
])
@pytest.mark.slow
def test_a_chapter_that_shows_or_raises_a_secret_is_refused_and_no_file_keeps_it(book, monkeypatch, cell, code, said):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    mini_book.write(book, **{cell: f"import os\n{code}\n"})
    found = refusal(execute, only_chapter(book))
    assert said in found
    assert "anary" not in found
    assert only_chapter(book).partial.is_file() == ("raise" in code)
    assert leaks(book / "_build") == []


def test_control_a_canary_in_a_file_is_found(tmp_path):
    (tmp_path / "log").write_bytes(b"\x00 token=" + CANARIES["HF_TOKEN"].encode() + b"\xff")
    assert len(leaks(tmp_path)) > 0


# Code from files


def harmful(source: str) -> list[str]:
    """List what in a source could run code that a file brought along."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in HARMFUL_MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in HARMFUL_CALLS or (name in SAFE_WITH and SAFE_WITH[name] not in keywords.items()):
            found.append(name)
        found += [key for key in ("trust_remote_code", "allow_pickle", "shell") if keywords.get(key) == "True"]
    return found


HARMFUL_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
HARMFUL_CALLS = {
    "eval", "exec", "compile", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load",
    "pd.read_pickle", "pandas.read_pickle",
}
# Calls that this argument makes safe.
SAFE_WITH = {
    "torch.load": ("weights_only", "True"), "yaml.load": ("Loader", "getattr(yaml, 'CSafeLoader', yaml.SafeLoader)"),
}


def sources() -> dict[str, str]:
    files = [path for folder in ("src", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in files}
    for path in (ROOT / "chapters").glob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        found[path.name] = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return found


def test_no_source_loads_a_pickle_or_runs_what_a_file_says():
    assert len(sources()) > 50
    assert {name: found for name, source in sources().items() if (found := harmful(source))} == {}


def test_control_what_would_run_a_files_code_is_found_and_what_runs_none_is_not():
    for source in (
        "import pickle", "from joblib import load", "torch.load('x')", "torch.load('x', weights_only=False)",
        "yaml.load(text)", "AutoModel.from_pretrained('x', trust_remote_code=True)", "np.load('x', allow_pickle=True)",
        "subprocess.run('x', shell=True)", "eval(text)",
    ):
        assert len(harmful(source)) > 0, source
    assert harmful("torch.load('x', weights_only=True)\nyaml.safe_load(t)\nmodel.eval()\nre.compile('x')") == []


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['touch harm']", "!!python/name:os.system"])
def test_parameters_in_yaml_cannot_execute(book, monkeypatch, tag):
    monkeypatch.chdir(book)
    (book / "parameters" / "few.yaml").write_text(f"{mini_book.STEM}:\n  n: {tag}\n")
    assert "not valid YAML" in refusal(planning.plan, "few", mini_book.folders(book))
    assert not (book / "harm").exists()


# Writes outside


@pytest.mark.parametrize("name", ["../../outside", "/outside", "..", "a/b", ""])
def test_a_chapters_name_cannot_lead_out_of_the_folder_of_figures(name):
    assert "cannot name a chapter" in refusal(publish.Page, name)


@pytest.mark.parametrize("profile", ["../few", "/etc/passwd", "..", "a/b"])
def test_a_profiles_name_cannot_lead_out_of_the_folder_of_parameters(book, profile):
    (book / "few.yaml").write_text("{}")
    assert "no parameter set" in refusal(planning.plan, profile, mini_book.folders(book))


def test_parameters_that_are_paths_write_nothing_outside_the_build_folder(
    tmp_path, llama_folder, text_folder, kvbook_here, monkeypatch
):
    inside = tmp_path / "deep" / "down"
    inside.mkdir(parents=True)
    (tmp_path / "model").symlink_to(llama_folder)
    (tmp_path / "texts").symlink_to(text_folder)
    before = sorted(tmp_path.rglob("*"))
    models = ["model=../../model", "reference_model=../../model", "corpus=../../texts", "prompt=../../outside"]
    monkeypatch.chdir(inside)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "_build" / "runs")
    # Nobody else finds the model by this path.
    monkeypatch.setattr("kvbook.models.kept._kept", {})
    done = kvbook_here("run", "layer_drift", *models, "n_samples=1", "n_tokens=6", "dtypes=fp32")
    assert done.returncode == 0, done.stderr
    made = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert len(made) > 2
    assert all(path.is_relative_to(tmp_path / "_build") for path in made)


# Pages

@pytest.mark.slow
def test_what_a_model_writes_is_shown_on_a_page_and_never_obeyed(made):
    book, done = made
    assert "kvbook: chapter" not in done.stdout
    page = book / "_build" / "html" / "chapters" / "01_squares.html"
    assert page.is_file(), done.stdout
    found = BeautifulSoup(page.read_text(), "html.parser")
    assert not [script for script in found("script") if "alert(1)" in script.get_text()]
    assert not found.select("[src=x], iframe, [onerror], [href^='javascript:alert'], #raw")
    # Shown, not swallowed.
    assert found.get_text().count("<script>alert(1)</script>") >= 3
    # The file that it tried to include says this, and no page does.
    assert "n: 3" in (book / "parameters" / "few.yaml").read_text()
    assert "n: 3" not in found.get_text()


# What runs elsewhere

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# What each job may do beyond reading the repository.
ALLOWED = {
    ("publish.yml", "build"): {"pages": "read"}, ("release.yml", "release"): {"contents": "write"},
    ("release.yml", "publish"): {"id-token": "write"},
    ("publish.yml", "deploy"): {"pages": "write", "id-token": "write"},
}


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_may_do_no_more_than_it_needs_and_runs_only_what_is_pinned(file):
    content = yaml.safe_load(file.read_text())
    assert content["permissions"] == {"contents": "read"}
    # `on` is YAML's word for true.
    assert "pull_request_target" not in content[True]
    for name, job in content["jobs"].items():
        more = {key: value for key, value in job.get("permissions", {}).items() if (key, value) != ("contents", "read")}
        assert more == ALLOWED.get((file.name, name), {})
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
            # What a stranger can name must not become part of a command.
            assert "${{" not in step.get("run", "")


def test_every_requirement_is_pinned_to_one_version():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith(("#", "-e"))]
    assert len(wanted) > 10
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in wanted)


def test_nothing_is_installed_from_a_place_that_a_file_names():
    for file in (ROOT / "requirements.txt", ROOT / "pyproject.toml", ROOT / "Makefile", *WORKFLOWS):
        assert not re.search(r"index-url|find-links|--trusted-host", file.read_text()), file.name
