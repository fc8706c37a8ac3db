"""The how-to pages: their examples run, and print what the pages show."""

import re
import runpy
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from small_models import MIXTURE, NO_PAD
from small_models import checkpoint as made

import kvbook
from kvbook import paths

EXAMPLES = sorted((paths.ROOT / "examples/howto").glob("*.py"))
PAGES = sorted((paths.ROOT / "pages/howto").glob("*.md"))


# One is trained, one has experts; one has a pad token, one has none.
@pytest.fixture(scope="module", params=[MIXTURE, NO_PAD])
def checkpoint(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("howto"))


def masked(text: str) -> list[str]:
    """Hide what depends on the model's tokenizer: counts of ids, and bytes."""
    return [re.sub(r"\b[\d,]+(?= bytes)|\b\d+(?= of| ids| positions|,| at)", "#", line) for line in text.splitlines()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_on_a_stand_in_what_its_page_shows(example, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [example.name, checkpoint])
    # Compiled, it takes minutes and prints the same lines.
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    capsys.readouterr()
    runpy.run_path(str(example), run_name="__main__")
    assert masked(capsys.readouterr().out) == masked(example.with_suffix(".txt").read_text("utf-8"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_names_nothing_of_this_book_but_what_it_is_about(example):
    lines = map(str.strip, example.read_text("utf-8").splitlines())
    code = [line for line in lines if line and not line.startswith("#")]
    assert len(code) <= 34
    # But for those that show what only this package has.
    assert not any("kvbook" in line for line in code) or example.stem in ("bit_reproducible", "trainer_and_rollout")


def test_every_example_has_a_page_and_every_page_an_example():
    shown = {name for page in PAGES for name in re.findall(r"examples/howto/(\w+)\.py", page.read_text("utf-8"))}
    assert shown == {example.stem for example in EXAMPLES}
    # The page on servers has commands alone.
    assert len(PAGES) - 1 == len(EXAMPLES) == 9


def test_tokens_of_a_vllm_rollout_are_scored_as_the_page_does_and_moved_by_one_they_are_a_fault(
    checkpoint, monkeypatch, tmp_path
):
    page = (paths.ROOT / "pages/howto/trainer_and_rollout.md").read_text("utf-8")
    code = next(found for found in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def score" in found)
    written = SimpleNamespace(token_ids=list(range(20, 32)))
    outputs = [SimpleNamespace(prompt_token_ids=[5, 6, 7 + number], outputs=[written]) for number in range(5)]
    monkeypatch.chdir(tmp_path)
    exec(code, {"name": checkpoint, "outputs": outputs})
    trainer, control = (pd.read_json(f"{side}.jsonl", lines=True) for side in ("trainer", "control"))
    assert kvbook.check_scores(control, trainer, controls=[control]).verdict in ("exact", "rounding")
    late = trainer.assign(logprob=trainer.groupby("id")["logprob"].shift(-1)).dropna()
    assert kvbook.check_scores(late, trainer, controls=[control]).verdict == "fault"


def test_control_an_example_that_breaks_its_rule_prints_something_else(checkpoint, monkeypatch, capsys, tmp_path):
    code = (paths.ROOT / "examples/howto/past_the_window.py").read_text("utf-8")
    wrong = tmp_path / "past_the_window.py"
    # The old keys are kept, and only their front is cut off.
    broken = code.replace("cache, fed = None, ids[:, -keep:]", "[layer.crop(-1) for layer in cache.layers]")
    assert broken != code
    wrong.write_text(broken, "utf-8")
    monkeypatch.setattr(sys, "argv", ["x", checkpoint])
    runpy.run_path(str(wrong), run_name="__main__")
    assert "uncached loop: False" in capsys.readouterr().out
