"""The check of a running server: injected faults are found, and honest servers are not called faults."""

import functools
import json
import math
import os
import time

import jsonschema
import pytest
import serving
import torch
from refusing import refusal

from kvbook import paths
from kvbook.server import check, client, outcome, prompts

SCHEMA = json.loads((paths.DATA / "check" / "server_schema.json").read_text("utf-8"))
# What the how-to page gives to paste.
PAGE = (paths.ROOT / "pages/howto/server.md").read_text("utf-8")
COMMAND = next(line for line in PAGE.splitlines() if line.startswith("kvbook check"))
# One length has every kind of comparison: two blocks of 16, and an edit in the second.
LENGTHS = (32,)


@pytest.fixture
def engine(llama):
    """Return a function that makes the engine of a small model."""
    return functools.partial(serving.Engine, llama, serving.Words(320))


def checked(engine, lengths=LENGTHS, control=None, rows=None, **how) -> outcome.Outcome:
    """Check a server of an engine; `how` is as for `serving.serving`."""
    with serving.serving(engine, **how) as server:
        return check.check(client.of(server.address, timeout=600), control, lengths, rows)


@pytest.mark.parametrize("fault", serving.FAULTS)
def test_an_injected_fault_is_called_a_fault_with_the_shortest_requests_that_show_it(engine, fault):
    found = checked(engine(fault=fault))
    assert (found.verdict, found.status) == ("fault", 1)
    wrong = [each.kind for each in found.comparisons if each.verdict == "fault"]
    assert found.shortest.kind == wrong[0]
    assert (len(found.shortest.prompts) > 1, found.shortest.prefix_tokens) == (True, LENGTHS[0])
    expected = {"stale prefix": {"edited"}, "leak between conversations": {"two at once"}}
    assert set(wrong) == expected.get(fault, set(wrong))


def answering(status, body):
    """Answer every request so, whatever is asked."""
    return lambda handler, count: handler._send(status, body)


def _flaky(handler, count):
    """Refuse one request in four, and close the connection on another before it answers."""
    if count % 4 == 2:
        handler._send(503, {"error": {"message": "busy"}})
    handler.close_connection = count % 4 == 3
    return count % 4 not in (2, 3)


# On some processors reuse rounds as without it does.
HONEST = {
    "cache off": ({"block": 0}, {}, ["cannot tell"]), "cache on": ({}, {}, ["exact", "rounding"]),
    "batch-dependent": ({"batches": True}, {}, ["rounding"]), "flaky": ({}, {"before": _flaky}, ["exact", "rounding"]),
    "slow": ({}, {"before": lambda *_: time.sleep(0.02) or True}, ["exact", "rounding"]),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_server_is_not_called_a_fault(engine, name, monkeypatch):
    monkeypatch.setattr(client, "_PAUSE", 0.01)
    options, how, verdicts = HONEST[name]
    found = checked(engine(**options), **how)
    assert found.verdict in verdicts, found.why
    assert ("no reuse seen" in found.why) == (name == "cache off")


@pytest.mark.parametrize(("largest", "mean", "usual", "noise", "verdict"), [
    (0.0, 0.0, None, 0.0, "exact"), (9e-5, 1e-5, 0.0, 0.0, "rounding"), (0.2, 0.01, 0.06, 0.0, "rounding"),
    (0.2, 0.01, 0.04, 0.0, "fault"), (2.0, 0.6, None, 0.0, "fault"),
    # Asking again moves nothing, and no control shows the rounding of another shape.
    (0.2, 0.01, 0.0, 0.0, "cannot tell"), (0.2, 0.01, None, 0.0, "cannot tell"), (3.0, 2.0, 3.0, 0.6, "cannot tell"),
    # Without reuse there are numbers, or not even then.
    (math.nan, math.nan, 0.1, 0.01, "fault"), (math.nan, math.nan, math.nan, math.nan, "cannot tell"),
])
def test_a_difference_is_judged_by_those_of_requests_that_reuse_nothing(largest, mean, usual, noise, verdict):
    assert check.judge(largest, mean, usual, noise) == verdict


def test_without_a_way_to_reuse_nothing_a_fault_can_only_be_plain_and_a_second_server_decides(engine, monkeypatch):
    """A server that knows neither field reuses in spite of them."""
    deaf = engine(fault="positions off by one")
    deaf_answer = deaf.answer
    monkeypatch.setattr(deaf, "answer", lambda prompt, tokens, salt: deaf_answer(prompt, tokens, None))
    alone = checked(deaf)
    with serving.serving(engine(block=0)) as without:
        beside = checked(deaf, control=client.of(without.address))
    assert alone.cold.startswith("only the first request")
    assert {each.kind for each in alone.comparisons} == {"repeat"}
    assert alone.verdict in ("cannot tell", "fault")
    assert (beside.verdict, beside.cold) == ("fault", "--control")


def test_a_server_that_does_not_count_what_it_reuses_gets_no_verdict_unless_it_is_a_fault(engine):
    found = checked(engine(), reports=False)
    assert found.verdict == "cannot tell"
    assert "does not count" in found.why
    assert checked(engine(fault="positions off by one"), reports=False).verdict == "fault"


def test_a_server_that_dies_midway_is_judged_by_what_it_said(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(client, "_PAUSE", 0.001)

    def dying(handler, count):
        handler.close_connection = count > 16
        return count <= 16

    verdicts = {}
    for fault in ("", "positions off by one"):
        kept = tmp_path / f"{fault}.jsonl"
        found = checked(engine(fault=fault), rows=kept, before=dying)
        verdicts[fault] = found.verdict
        assert len(found.comparisons) >= 4
        assert sum("text" in each for each in [json.loads(line) for line in kept.read_text("utf-8").splitlines()]) == 16
    assert verdicts == {"": "cannot tell", "positions off by one": "fault"}


def test_an_engine_without_log_probabilities_or_without_completions_gets_no_verdict(engine):
    bare = {"choices": [{"text": " river", "logprobs": None}], "usage": {"prompt_tokens": 3}}
    for *answer, said in ((200, bare, "no log-probabilities"), (404, {"detail": "Not Found"}, "status 404: Not Found")):
        found = checked(engine(), before=answering(*answer))
        assert (found.verdict, found.status) == ("cannot tell", 2)
        assert said in found.why


# Addresses, tokens, limits.


@pytest.mark.parametrize(("address", "said"), [
    ("http://example.org/v1", "--remote"), ("https://10.0.0.7:8000/v1", "--remote"), ("http:///v1", "no address"),
    ("http://127.0.0.1:port/v1", "no address"), ("http://me:secret@127.0.0.1/v1", client.TOKEN),
])
def test_an_address_that_is_not_this_machines_or_none_at_all_is_refused(address, said):
    assert said in (refused := refusal(client.of, address))
    assert "secret" not in refused


def test_a_token_is_sent_and_written_nowhere_and_never_in_the_clear_to_another_machine(engine, monkeypatch, tmp_path):
    monkeypatch.setenv(client.TOKEN, "token-quokka")
    refusing = answering(401, {"error": {"message": "token-quokka is not allowed"}})
    for before in (lambda handler, count: True, refusing):
        with serving.serving(engine(), before=before) as server:
            found = check.check(client.of(server.address), None, LENGTHS, tmp_path / "answers.jsonl")
        told = server.seen[0]["headers"]["Authorization"], client.TOKEN in found.why
        assert told == ("Bearer token-quokka", before is refusing)
        assert "quokka" not in found.model_dump_json() + (tmp_path / "answers.jsonl").read_text("utf-8")
    assert client.of("https://example.org/v1", remote=True)
    assert "without encryption" in refusal(client.of, "http://example.org/v1", remote=True)


def test_a_request_ends_at_its_time_limit_even_where_a_byte_comes_now_and_then(engine, monkeypatch):
    monkeypatch.setattr(client, "_TRIES", 1)

    def dripping(handler, count):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)

    with serving.serving(engine(), before=dripping) as server:
        with pytest.raises(client.Unanswered, match="no whole answer in 0"):
            client.of(server.address)._replace(timeout=0.2).ask("x", 1)
        monkeypatch.setattr(client, "_MOST_BYTES", 3)
        with pytest.raises(client.Unanswered, match="too long"):
            client.of(server.address).ask("x", 1)


# The command.


def test_the_command_prints_lines_json_or_a_page_and_ends_with_the_status(engine, kvbook_here, tmp_path):
    # To write it anew: json.dumps(outcome.Outcome.model_json_schema(), indent=1) and a line break.
    assert outcome.Outcome.model_json_schema() == SCHEMA
    with serving.serving(engine(fault="positions off by one")) as server:
        asked = COMMAND.replace("http://127.0.0.1:8000/v1", server.address).split()[1:]
        told = kvbook_here(*asked, "--lengths", "32", "--json")
        named = "--model", "ours", "--report", tmp_path / "found.html"
        lines = kvbook_here("check", server.address, "--lengths", "32", *named)
    page = (tmp_path / "found.html").read_text("utf-8")
    jsonschema.validate(found := json.loads(told.stdout), SCHEMA)
    assert (told.returncode, lines.returncode, found["schema_version"]) == (1, 1, 1)
    assert "\nverdict   fault: reuse moves log-probabilities by" in lines.stdout
    assert len(lines.stdout.splitlines()) <= 12
    assert "fault: reuse moves log-probabilities by" in page
    assert page.count("<pre>") == len(found["shortest"]["prompts"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found | {"verdict": "fine"}, SCHEMA)


@pytest.mark.parametrize(("arguments", "said"), [
    (("http://127.0.0.1:9/v1",), "no server answers"), (("http://127.0.0.1:9/v1", "--lengths", "a"), "--lengths a"),
    (("http://example.org/v1",), "--remote"), (("http://127.0.0.1:9/v1", "--report", "a.txt"), "name a .html file"),
    (("http://127.0.0.1:9/v1", "--thorough", "--seed", "1"), "takes no --seed and no --thorough"),
    (("llama", "--timeout", "9"), "takes no --timeout"),
    (("llama", "--prefix", "a", "--rest", "b", "--json", "--seed", "1"), "takes no --seed and no --json"),
])
def test_bad_input_is_one_line_and_status_2(refused, monkeypatch, arguments, said):
    monkeypatch.setattr(client, "_PAUSE", 0)
    assert said in refused("check", *arguments)


def test_of_several_models_one_must_be_named(engine, monkeypatch):
    monkeypatch.setattr(client.Client, "models", lambda _: ["one", "two"])
    assert "2 models (one, two)" in refusal(checked, engine())


def test_the_trained_model_behind_an_honest_server_is_no_fault_and_off_by_one_is(real_model, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert os.environ["OMP_NUM_THREADS"] == "1"
    # After some first lines the answer has other tokens within a prompt: then no control moves, and it cannot tell.
    monkeypatch.setattr(prompts, "opening", lambda: " ".join(("", *prompts.WORDS[:3])))
    # Its first layers alone: all of them take thrice as long, and show no more.
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32, num_hidden_layers=8).eval()
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    # A length that is not whole blocks, whose requests are half as many.
    for fault, verdicts in (("", ["exact", "rounding"]), ("positions off by one", ["fault"])):
        found = checked(serving.Engine(model, tokenizer, fault=fault), (31,))
        assert found.verdict in verdicts, found.why
