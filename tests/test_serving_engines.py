"""The chapter on serving engines: on a stand-in, on rows made by hand, and by recorded answers of the engines."""

import gzip
import json
import re
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from refusing import refusal
from scipy.stats import entropy

from kvbook import paths
from kvbook.server import check, client, prompts
from kvreport.chapters.serving_engines import ServingEnginesSettings, figures, measures, measuring, rows, tables
from kvreport.publishing import found, statements

SETTINGS = ServingEnginesSettings(n_samples=2, prompt_tokens=34, new_tokens=6)
PAGE = paths.ROOT / "pages" / "howto" / "server.md"
ANSWERS = {file.name.removesuffix(".json.gz"): file for file in (Path(__file__).parent / "answers").glob("*.json.gz")}


@pytest.fixture(scope="module")
def results():
    return found.measured("serving_engines", SETTINGS)


def of(tokens: pd.DataFrame) -> found.Found:
    made = found.of_runs("serving_engines", {})
    made._made["tokens"] = tokens
    return made


def test_without_engines_the_library_itself_is_measured_in_every_way(results):
    assert [name for name, run in results.runs.items() if run is not None] == ["served_transformers"]
    assert set(results["ways"]["way"]) == {rows.AGAIN, rows.WARM, rows.BATCH}
    assert results["ways"].query("way == 'again'")["bits_equal"].all()
    (legend,) = figures.figure_ways(tables.by_way(results)).legends
    assert {key.get_text() for key in legend.get_texts()} == {rows.AGAIN, rows.WARM, rows.BATCH}
    assert results["ways"].query("way == 'warm'")["cached"].eq(rows.BLOCK).all()
    assert len(tables.ways(results)) == 6


def test_fp32_is_as_far_from_fp64_as_it_rounds_and_bf16_much_further(results):
    (fp32,), (bf16,) = (measures.ERROR.where(dtype=dtype)(results) for dtype in ("float32", "bfloat16"))
    assert 0 < fp32.estimate.value < 1e-5 < 1e-3 < bf16.estimate.value


def test_control_a_moved_log_probability_and_another_token_are_found(results):
    moved = results["tokens"].copy()
    moved.loc[moved["way"] == rows.AGAIN, "logprob"] += 1e-7
    assert (of(moved)["ways"].query("way == 'again'")[["texts_equal", "bits_equal"]] == [1, 0]).all(axis=None)
    other = results["tokens"].copy()
    other.loc[(other["way"] == rows.AGAIN) & (other["position"] == 2), "token"] += 1
    assert (of(other)["ways"].query("way == 'again'")["common"] == 2).all()
    # Its log-probabilities up to there are those of the cold text.
    assert statements.check(measures.STATEMENTS["a-repeat-is-exact"], of(other)).outcome == "fails"


def test_two_engines_are_compared_after_each_prompt(results):
    second = results["tokens"].assign(engine="vLLM")
    second["logprob"] += 0.5
    both = of(pd.concat([results["tokens"], second], ignore_index=True))
    (apart,) = measures.PAIR_MOVED(both)
    assert apart.estimate.value == pytest.approx(0.5)
    assert tables.pairs(both)["tokens equal"].tolist() == ["2 of 2"]


def test_a_divergence_is_that_of_the_likeliest_tokens_and_the_rest():
    shares, theirs = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]
    exact, told = torch.tensor(shares, dtype=torch.float64).log(), dict(enumerate(np.log(theirs)))
    assert float(measuring.divergence(exact, told)) == pytest.approx(entropy(shares, theirs), rel=1e-5)
    two = {place: told[place] for place in (0, 1)}
    merged = entropy([0.5, 0.3, 0.2], [0.4, 0.3, 0.3])
    assert float(measuring.divergence(exact, two)) == pytest.approx(merged, rel=1e-5)
    # Control: the same numbers do not diverge, and one token alone tells nothing.
    assert float(measuring.divergence(exact, dict(enumerate(exact.tolist())))) == pytest.approx(0, abs=1e-12)
    assert measuring.divergence(exact, {0: -0.7}) == ""


def test_an_answer_is_read_in_both_forms_and_refused_without_log_probabilities():
    content = [{"id": 5, "token": " a", "logprob": -0.25, "top_logprobs": [{"id": 5, "logprob": -0.25}]}]
    usage = {"prompt_tokens_details": {"cached_tokens": 16}}
    first = measuring.written({"choices": [{"logprobs": {"content": content}}], "usage": usage})
    told = {"tokens": ["token_id:5"], "token_logprobs": [-0.25], "top_logprobs": [{"token_id:5": -0.25}]}
    assert first == measuring.written({"choices": [{"logprobs": told}], "usage": usage})
    assert (first.tokens, first.cached) == ([5], 16)
    with pytest.raises(client.Refused, match="no log-probabilities"):
        measuring.written({"choices": [{"text": " a"}]})


def test_prompts_that_are_too_short_are_refused_in_one_line(text_folder):
    asked = SETTINGS.model_copy(update={"populations": (str(text_folder),), "prompt_tokens": 10_000})
    assert "lower prompt_tokens" in refusal(measuring.prompts, asked, asked.populations[0])


def key(call):
    """What names a request: a salt is drawn anew each time, and a model's name is not kept."""
    body = {name: value for name, value in (call["body"] or {}).items() if name not in ("cache_salt", "model")}
    return call["path"], body


def recorded_of(name):
    return json.loads(gzip.decompress(ANSWERS[name].read_bytes()))


def replayed(recorded, monkeypatch):
    """Check an engine by recorded answers: each request gets the next one that was given to it."""
    calls, lock = list(recorded["calls"]), threading.Lock()

    def call(_client, _method, path, body=None):
        with lock:
            asked = key({"path": path, "body": body})
            one = calls.pop(next(place for place, one in enumerate(calls) if key(one) == asked))
        if "refused" in one:
            raise client.Refused(one["refused"])
        return one["reply"]

    monkeypatch.setattr(client.Client, "call", call)
    monkeypatch.setattr(prompts, "opening", lambda: recorded["opening"])
    return check.check(client.Client("http://127.0.0.1:1/v1", model="served"), None, (32,))


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_what_an_engine_answered_is_judged_as_it_was(name, monkeypatch):
    recorded = recorded_of(name)
    again = replayed(recorded, monkeypatch)
    assert (again.verdict, again.why) == (recorded["verdict"], recorded["why"])
    assert again.verdict != "fault"


@pytest.mark.parametrize("name", ["llama.cpp", "vllm"])
def test_what_the_how_to_prints_is_what_the_recorded_answers_print(name, monkeypatch):
    lines = replayed(recorded_of(name), monkeypatch).lines
    printed = re.findall(r"```text\n((?:reuse|verdict) .*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(printed) == 2
    assert any(set(block.splitlines()) <= set(lines) for block in printed)


def test_control_recorded_answers_whose_reuse_moves_are_called_a_fault(monkeypatch):
    recorded = recorded_of("llama.cpp")
    for call in recorded["calls"]:
        if call["body"] and call["body"].get("cache_prompt", True) and "choices" in call.get("reply", {}):
            for one in call["reply"]["choices"][0]["logprobs"]["content"]:
                one["logprob"] -= 2
    assert replayed(recorded, monkeypatch).verdict == "fault"
