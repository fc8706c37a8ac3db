"""Signatures of faults in log-probabilities, on recorded rows of the real model: each is named, and rounding is not."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import score_judged
import yaml

from kvbook import paths
from kvbook.scores import signatures

FAULTS = score_judged.faults()
FOLDER = paths.DATA / "scores"
# What each signature must be told by: a case of the recorded rows.
KINDS = {
    "shift": "shift", "stale": "stale", "special": "special", "wrong_from": "wrong_from",
    "left_padding": "left_padding", "processed: top-p 0.9": "processed", "processed: top-k 20": "processed",
    "temperature": "temperature", "template": "template", "low_precision": "low_precision",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_fault_on_the_real_model_is_named_by_its_signature(name):
    found = score_judged.case(FAULTS[name, "float32"])
    assert (found.verdict, found.causes[0].key) == ("fault", KINDS[name])
    assert found.suspicious


def test_another_tokenizer_is_named_by_the_ids_alone():
    rows = FAULTS["clean", "float32"]
    a, b = (rows[["id", "position", "token"]].assign(logprob=rows[side]) for side in ("rollout", "trainer"))
    found = score_judged.outcome.of(score_judged.tables.join(a, b.assign(token=b["token"] + (b["position"] > 60))))
    assert (found.verdict, [cause.key for cause in found.causes]) == ("fault", ["template"])
    assert found.suspicious[0].position > 60
    assert found.n_suspicious == (rows["position"] > 60).sum()


def test_every_signature_has_a_case_and_says_what_it_cannot_be_told_apart_from():
    assert {signature.key for signature in signatures.SIGNATURES} == set(KINDS.values())
    assert all(signature.not_apart_from and signature.remedy for signature in signatures.SIGNATURES)


@pytest.mark.parametrize("control", [True, False])
def test_control_rounding_of_a_cache_on_the_same_texts_has_no_signature(control):
    found = score_judged.case(FAULTS["clean", "float32"], control)
    assert (found.verdict, found.causes) == ("rounding", [])


def test_a_stale_policy_needs_two_steps():
    rows = FAULTS["stale", "float32"]
    one = rows[rows["step"] == rows["step"].max()].reset_index(drop=True)
    assert "stale" not in [cause.key for cause in score_judged.case(one).causes]


def test_faults_that_were_listed_beforehand_are_judged_as_the_page_shows():
    listed = yaml.safe_load((FOLDER / "held_out.yaml").read_text("utf-8"))
    assert len(listed) == 20
    assert {name for name, _ in FAULTS} >= set(listed)
    assert score_judged.held_out() == (FOLDER / "held_out.txt").read_text("utf-8").splitlines()


@pytest.mark.slow
def test_a_thousand_clean_comparisons_of_recorded_rows_are_no_faults_and_a_lost_token_is():
    lines = score_judged.clean()
    assert lines == (FOLDER / "clean.txt").read_text("utf-8").splitlines()
    total, fired = map(int, re.fullmatch(r"(\d+) clean comparisons, (\d+) called a fault", lines[-1]).groups())
    assert total >= 1000
    assert fired == 0
    lost = [found.verdict for _, _, control, found in score_judged.compared(score_judged.WRONG) if control]
    assert set(lost) <= {"fault", "undecided"}
    assert lost.count("fault") > len(lost) * 0.8


def test_the_snippet_for_vllm_makes_a_table(monkeypatch, tmp_path):
    page = (paths.ROOT / "pages/howto/trainer_and_rollout.md").read_text("utf-8")
    snippet = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    place = {5: SimpleNamespace(logprob=-1.0), 6: SimpleNamespace(logprob=-0.5)}
    output = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[SimpleNamespace(token_ids=[5, 6], logprobs=[place] * 2)])
    engine = ModuleType("vllm")
    engine.LLM = lambda name: SimpleNamespace(generate=lambda prompts, how: [output] * len(prompts))
    engine.SamplingParams = lambda **how: how
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.chdir(tmp_path)
    exec(snippet, {"name": "model", "prompts": ["a", "b"]})
    assert score_judged.tables.read("rollout.jsonl")["logprob"].tolist() == [-1.0, -0.5] * 2
