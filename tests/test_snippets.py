"""What the front page, the story, chapter 1 and a how-to page give to copy runs as it is pasted."""

import contextlib
import copy
import functools
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_models import MIXTURE, NO_PAD, PLAIN, PLAIN_TOO, checkpoint
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbook import paths
from kvbook.atlas import configurations
from kvreport.publishing import captions, found

PAGES = ("index.md", "pages/story.md", "chapters/01_bug_or_rounding.ipynb", "pages/howto/static_cache.md")
TEXT = "def area(width, height):\n    return width * height  # of a rectangle\n"
# What only some snippets have, by a word of theirs.
DRIFT, EQUAL, REUSED, RECURRENT = "a.std()", "row_invariant()", "prompt_cache", "cache_params"


def snippets(page: str) -> list[str]:
    """Take every block of Python from a page or a notebook's prose."""
    text = (paths.ROOT / page).read_text("utf-8")
    if page.endswith(".ipynb"):
        text = "\n".join(captions.prose(json.loads(text)))
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def given(snippet: str) -> list[str]:
    """Read from its first line what a snippet takes for granted."""
    return re.match(r"# Given: (.*)\n", snippet)[1].split(", ")


def everything(kind: str, folder: Path, n_layers: int = 6) -> dict[str, object]:
    """Return all that a snippet may take for granted; more layers take longer to trace, and show no more."""
    tokenizer = AutoTokenizer.from_pretrained(name := checkpoint(kind, folder))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    del next(part for part in model.base_model.children() if isinstance(part, torch.nn.ModuleList))[n_layers:]
    model.config.num_hidden_layers = min(n_layers, model.config.num_hidden_layers)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "cut")
    return {"name": str(folder / "cut"), "model": model, "tokenizer": tokenizer, "text": TEXT}


# The last is the plain one but for its pad token.
@pytest.fixture(scope="module", params=[PLAIN_TOO, MIXTURE, NO_PAD])
def values(request, tmp_path_factory):
    found = everything(request.param, tmp_path_factory.mktemp("snippets"))
    assert (found["tokenizer"].pad_token is None) == (request.param == NO_PAD)
    return found


@pytest.fixture
def graphs(monkeypatch):
    """Count the graphs that a snippet compiles, up to four, and compile none of them to machine code."""
    counter = CompileCounter()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    with torch._dynamo.config.patch(recompile_limit=4):
        yield counter
    torch._dynamo.reset()


def run(snippet: str, values: dict[str, object]) -> None:
    # On the processor where there is no GPU.
    if not torch.cuda.is_available():
        snippet = snippet.replace('.to("cuda")', "")
    # A copy: a snippet may change what it is given, as by a pad token.
    exec(compile(snippet, "snippet", "exec"), {name: copy.deepcopy(values[name]) for name in given(snippet)})


SNIPPETS = [(page, place, code) for page in PAGES for place, code in enumerate(snippets(page))]


def test_four_pages_have_snippets_and_these_begin_with_what_they_take_for_granted():
    assert [sum(page == where for page, _, _ in SNIPPETS) for where in PAGES] == [9, 1, 1, 1]
    for _, _, code in SNIPPETS:
        assert set(given(code)) <= {"name", "model", "tokenizer", "text"}
        assert len(code.splitlines()) <= 20
    for code in (code for _, _, code in SNIPPETS if DRIFT in code):
        lines = [line for line in code.splitlines() if line and not line.startswith("#")]
        assert len(lines) == 8
        assert max(map(len, lines)) <= 79, "more would be cut beside two columns of contents"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "place", "code"), SNIPPETS, ids=[f"{page}-{place}" for page, place, _ in SNIPPETS])
def test_a_snippet_runs_as_it_is_pasted(page, place, code, values, graphs, capsys):
    capsys.readouterr()
    run(code, values)
    printed = capsys.readouterr().out.strip()
    assert bool(printed) == ("print(" in code)
    assert graphs.frame_count < 4
    if DRIFT in code:
        assert float(printed) < 1e-7
    if EQUAL in code:
        assert printed == "True"
    if REUSED in code:
        ids = values["tokenizer"]("You answer in one word. The capital of France is", return_tensors="pt").input_ids
        fresh = values["model"].generate(ids, max_new_tokens=8, do_sample=False)
        assert "cached ids are shared" in printed
        assert printed.endswith(values["tokenizer"].decode(fresh[0]).strip())


def test_the_hook_on_the_head_computes_logits_in_fp32_and_leaves_the_weights_in_bf16(values):
    model, ids = copy.deepcopy(values["model"]).bfloat16(), torch.arange(8)[None]
    before = model(ids).logits
    exec(snippet("get_output_embeddings"), {"model": model})
    assert (before.dtype, model(ids).logits.dtype) == (torch.bfloat16, torch.float32)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(model(ids).logits.bfloat16(), before)


def test_the_loop_in_nanogpts_terms_refills_a_full_cache_and_never_feeds_a_token_twice():
    names = {}
    exec((paths.ROOT / "examples/past_the_block.py").read_text("utf-8"), names)
    fed = []

    def model(idx, cache, held):
        """Take the place of a GPT whose cache is the tokens that it holds, and whose next token is their number."""
        cache = torch.cat([cache, idx], dim=1) if cache is not None else idx
        assert held == cache.size(1) - idx.size(1)
        fed.append((held, idx.size(1)))
        return torch.nn.functional.one_hot(torch.full((1, idx.size(1)), cache.size(1)), 20), cache

    written = names["generate"](model, torch.arange(11)[None], 9, block_size=8)
    # The prompt is cut to a block, which is full at once; half of it is read again each time that it is full.
    assert fed == [(0, 8), (0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (0, 4), (4, 1), (5, 1)]
    assert written[0, 11:].tolist() == [8, 4, 5, 6, 7, 8, 4, 5, 6]


PAD = "tokenizer.pad_token"
# What each remedy was before: pasted alone it fails, or does something else.
BROKEN = {
    "a missing import": (PLAIN, EQUAL, "from kvbook.exact import row_invariant\n", NameError),
    "no pad token": (NO_PAD, "padding=True", f"{PAD} = {PAD} or tokenizer.eos_token\n", ValueError),
    "experts in fp64": (MIXTURE, DRIFT, ', "experts_implementation": "eager"', RuntimeError),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "word", "line", "error"), BROKEN.values(), ids=BROKEN)
def test_control_a_snippet_without_what_it_needs_fails(kind, word, line, error, tmp_path):
    code = snippet(word)
    assert line in code
    with pytest.raises(error):
        run(code.replace(line, ""), everything(kind, tmp_path))


@pytest.mark.slow
def test_control_without_its_static_cache_a_compiled_step_is_compiled_over_and_over(graphs, tmp_path):
    code = snippet("torch.compile")
    changed = code.replace("StaticCache", "DynamicCache").replace(", max_cache_len=ids.shape[1] + 20", "")
    assert ("StaticCache(" in code, "max_cache_len" in changed) == (True, False)
    run(changed, everything(PLAIN, tmp_path, n_layers=1))
    assert graphs.frame_count == 4


def snippet(word: str) -> str:
    return next(code for _, _, code in SNIPPETS if word in code)


# A tokenizer for models that never saw text.
IDS = configurations.text(24)


def ids_of(_text: str, return_tensors: str) -> SimpleNamespace:
    return SimpleNamespace(input_ids=IDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "jamba", "falcon_mamba", "zamba"])
def test_fed_by_the_remedy_a_recurrent_model_gives_the_full_passes_logits_and_in_chunks_it_does_not(name):
    full, apart = (model := configurations.build(name))(IDS, use_cache=False).logits, []
    for code in (snippet(RECURRENT), snippet(RECURRENT).replace("*[1] * 8", "8")):
        values = {"model": model, "tokenizer": ids_of, "text": ""}
        exec(code, values)
        apart.append((torch.cat(values["logits"], dim=1) - full).abs().max().item())
    assert apart[0] < 1e-4 < apart[1]


# What the front page calls rounding.
ROUNDING = 1e-5
# All architectures, or a seeded dozen of those that run.
COUNT = None if os.environ.get("KVBOOK_ALL_ARCHITECTURES") else 12


@pytest.fixture
def drift_of(tmp_path, monkeypatch, capsys):
    """Return a function that pastes the lines that decide, for a tiny model of an architecture."""
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: ids_of)

    def decide(name: str) -> float:
        configurations.build(name).save_pretrained(tmp_path / name)
        capsys.readouterr()
        exec(snippet(DRIFT), {"name": tmp_path / name, "text": ""})
        return float(capsys.readouterr().out)

    return decide


@pytest.mark.slow
def test_the_lines_that_decide_agree_with_the_atlas_on_its_architectures(drift_of):
    rows = {row["architecture"]: row for row in found.printed("atlas")["architectures"]["row"]}
    names = sorted(rows)
    random.Random(48).shuffle(names)
    wrong = {}
    for name in names:
        if len(wrong) == COUNT:
            break
        # What cannot be built, saved, loaded in fp64, or fed on a cache is not judged.
        with contextlib.suppress(Exception):
            wrong[name] = not drift_of(name) < ROUNDING
    assert len(wrong) == COUNT or len(wrong) >= 160
    assert wrong == {name: rows[name].get("token by token") not in ("exact", "rounding") for name in wrong}


@pytest.mark.slow
def test_control_a_wrong_cache_is_not_called_rounding_and_three_classes_call_theirs_otherwise(drift_of):
    # The largest and the smallest drift of a wrong cache, and a full pass that reads ahead.
    for name in ("moshi", "nemotron_h", "prophetnet"):
        assert drift_of(name) > ROUNDING
    # Where the front page says that its lines cannot run.
    for name in ("mamba", "rwkv", "xlstm"):
        with pytest.raises(AttributeError, match="past_key_values"):
            drift_of(name)
