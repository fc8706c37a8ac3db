"""`kvbook scores`: what it reads, what it refuses, and what it says; its measures, and signatures of faults."""

import json
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import score_judged
import torch
import yaml
from refusing import refusal

import kvbook
from kvbook import paths
from kvbook.scores import adapters, measures, outcome, signatures, tables, verdict

# What the how-to page gives to paste.
PAGE = (paths.ROOT / "pages/howto/trainer_and_rollout.md").read_text("utf-8")
COMMAND = next(line for line in PAGE.splitlines() if line.startswith("kvbook scores"))
RNG = np.random.default_rng(4)
N, LONG = 8, 12
A = pd.DataFrame({
    "id": np.repeat([f"s{number}" for number in range(N)], LONG), "position": np.tile(np.arange(5, 5 + LONG), N),
    "token": RNG.integers(0, 900, N * LONG), "logprob": -RNG.gamma(1.0, 1.5, N * LONG),
})


def moved(by: float, seed: int = 0, of: pd.DataFrame = A) -> pd.DataFrame:
    """Return a table with a difference of that size at every token."""
    return of.assign(logprob=np.minimum(of["logprob"] + np.random.default_rng(seed).normal(0, by, len(of)), 0))


def written(table: pd.DataFrame, to) -> str:
    table.to_json(to, orient="records", lines=True, double_precision=15)
    return str(to)


@pytest.mark.parametrize(
    ("b", "controls", "expected"),
    [
        (A, [], "exact"), (moved(1e-6), [], "rounding"), (moved(0.05), [], "undecided"),
        (moved(0.05), [moved(0.05, 1)], "rounding"), (moved(0.05), [moved(0.01, 1, moved(0.05))], "fault"),
        (moved(0.05), [moved(0.05)], "undecided"), (moved(2.0), [], "fault"),
    ],
    ids=["equal", "fp32", "alone", "within", "beyond", "control is B", "plain"],
)
def test_a_gap_is_judged_by_the_controls_and_without_them_only_where_it_is_tiny_or_huge(b, controls, expected):
    found = kvbook.check_scores(A, b, controls=controls)
    assert (found.verdict, found.status) == (expected, outcome.STATUS[expected])


def test_one_token_that_no_control_comes_near_is_a_fault_and_is_the_first_that_is_listed():
    wrong = A.copy()
    wrong.loc[40, "logprob"] -= 3
    found = kvbook.check_scores(wrong, moved(0.02), controls=[A])
    assert (found.verdict, found.n_suspicious) == ("fault", 1)
    assert (found.suspicious[0].id, found.suspicious[0].position) == (A["id"][40], A["position"][40])


def test_a_few_sequences_decide_nothing():
    few = A["id"].isin(["s0", "s1", "s2"])
    tabled = [table[few].reset_index(drop=True) for table in (A, moved(0.05), moved(0.05, 1))]
    assert kvbook.check_scores(tabled[0], tabled[1], controls=tabled[2:]).verdict == "undecided"


BAD = {
    "B does not join: none": (A, A.assign(id=A["id"] + "x"), "do not join: none of A's 96 rows"),
    "a row is missing": (A, A.drop(index=7), "do not join: 95 of A's 96 rows are in B, which lacks id s0, position 12"),
    "ids of another kind": (A, A.assign(id=np.repeat(range(N), LONG)), "ids are as 's0' in A and as 0 in B"),
    "positions are not sorted": (A.iloc[::-1].reset_index(drop=True), A, "A: positions must grow within a sequence"),
    "a position twice": (A.assign(position=3), A, "A: positions must grow"),
    "sequences are mixed": (A.sort_values("position"), A, "A: the rows of a sequence must follow"),
    "NaN": (A, A.assign(logprob=A["logprob"].where(A.index != 9)), "B: the log-probability at id s0, position 14"),
    "parts of a position": (A.assign(position=A["position"] + 0.5), A, "A: the position at id s0, position"),
    "text": (A.assign(logprob="x"), A, "A: logprob and position must be numbers"),
    "probabilities": (A.assign(logprob=np.exp(A["logprob"])), A, "A has probabilities, all between 0 and 1"),
    "above 0": (A, A.assign(logprob=A["logprob"] + 1), "B: the log-probability at id s0, position"),
    "base 10": (A, A.assign(logprob=A["logprob"] / np.log(10)), "B has logarithms to base 10: multiply them by"),
    "base 2": (A.assign(logprob=A["logprob"] / np.log(2)), A, "A has logarithms to base 2"),
    "no column": (A.drop(columns="token"), A, "A has no column token"),
    "empty": (A.iloc[:0], A, "A has no rows"),
}


@pytest.mark.parametrize(("a", "b", "words"), BAD.values(), ids=BAD)
def test_bad_tables_are_refused_in_one_line_that_says_what_is_wrong(a, b, words):
    assert words in refusal(kvbook.check_scores, a, b)


def test_a_control_that_scores_other_tokens_is_refused():
    other = moved(0.05, 1).assign(token=A["token"].where(A.index != 9, -1))
    words = refusal(lambda: kvbook.check_scores(A, moved(0.05), controls=[A, other]))
    assert "control 2 has another token at id s0, position 14" in words


def test_rows_that_only_the_trainer_has_are_left_out_and_counted():
    found = kvbook.check_scores(A[A["position"] > 8].reset_index(drop=True), A)
    assert (found.verdict, found.left_out) == ("exact", 4 * N)


def test_tensors_of_any_dtype_are_compared_where_the_mask_is_set():
    values = torch.tensor(A["logprob"].to_numpy().reshape(N, LONG), dtype=torch.bfloat16)
    mask = torch.ones(N, LONG)
    mask[:, -2:] = 0
    spoilt = torch.where(mask.bool(), values, torch.nan)
    found = kvbook.check_scores(values, spoilt, mask=mask)
    assert (found.verdict, found.tokens) == ("exact", N * (LONG - 2))
    assert f"id 0, position {LONG - 2} is no finite number" in refusal(kvbook.check_scores, values, spoilt)
    assert "shape" in refusal(kvbook.check_scores, values, values, mask=mask[:, 1:])


@pytest.mark.parametrize(("b", "status", "word"), [
    (moved(1e-6), 0, "rounding"), (moved(2.0), 1, "fault"), (moved(0.05), 2, "undecided"),
])
def test_the_command_prints_the_verdict_and_has_its_exit_status(b, status, word, kvbook_here, tmp_path):
    done = kvbook_here("scores", written(A, tmp_path / "a.jsonl"), written(b, tmp_path / "b.jsonl"))
    assert done.returncode == status
    assert f"verdict   {word}: " in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 250


def test_the_how_to_pages_command_runs_and_json_is_by_its_schema(kvbook_here, tmp_path, monkeypatch):
    import jsonschema

    monkeypatch.chdir(tmp_path)
    for name, table in {"rollout": A, "trainer": moved(0.05), "control": moved(0.05, 1)}.items():
        written(table, tmp_path / f"{name}.jsonl")
    plot = tmp_path / "drawn.png"
    done = kvbook_here(*COMMAND.split()[1:], "--json", "--plot", plot)
    schema = json.loads((paths.DATA / "scores" / "schema.json").read_text("utf-8"))
    assert schema == outcome.Outcome.model_json_schema(mode="serialization")
    jsonschema.validate(json.loads(done.stdout), schema)
    assert json.loads(done.stdout)["verdict"] == "rounding"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("text", "words"), [
    ("", "is empty"), ("[1, 2]\n", "line 1 is no JSON object"),
    ('{"id": 1}\n', "has no position; rows have id, position, token, logprob, or are of TRL, verl, vLLM, an OpenAI"),
    ('{"id": "a", "position": 1, "token": 5, "logprob": -1}\nnonsense\n', "line 2 is no JSON object"),
    ('{"id": "a", "position": 1, "token": 5, "logprob": -1, "schema_version": 0}\n', "schema_version 0"),
])
def test_a_file_that_is_no_table_is_refused_in_one_line(text, words, refused, tmp_path):
    (tmp_path / "a.jsonl").write_text(text)
    assert words in refused("scores", tmp_path / "a.jsonl", tmp_path / "a.jsonl")


def test_a_table_is_not_its_own_control(refused):
    assert "a.jsonl cannot be its own control" in refused("scores", "a.jsonl", "b.jsonl", "--control", "a.jsonl")


def test_blocks_of_lines_join_to_one_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_BLOCK", 7)
    pd.testing.assert_frame_equal(tables.read(written(A, tmp_path / "a.jsonl")), A, check_exact=False, rtol=1e-12)


def test_parquet_is_read_and_without_pyarrow_the_remedy_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setattr(pd, "read_parquet", lambda path: A)
    assert tables.read(tmp_path / "a.parquet") is A
    monkeypatch.setattr(pd, "read_parquet", Mock(side_effect=ImportError))
    assert "pip install pyarrow" in refusal(tables.read, tmp_path / "a.parquet")


# Two prompts of 3 and 2 tokens, answers of 2 and 3.
EXPECTED = pd.DataFrame({
    "id": [0, 0, 1, 1, 1], "position": [3, 4, 2, 3, 4], "token": [11, 12, 13, 14, 15],
    "logprob": [-1.0, -2.0, -3.0, -4.0, -5.0],
})
ROWS = [[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]
TRAINED = [[-1.5, -2.5, 0.0], [-3.5, -4.5, -5.5]]
IDS, MASK = [[11, 12, 0], [13, 14, 15]], [[1, 1, 0], [1, 1, 1]]
PLACES = [{11: -1.0, 7: -0.5}, {12: -2.0, 7: -0.5}], [{13: -3.0}, {14: -4.0, 7: -0.1}, {15: -5.0, 7: -0.2}]
DUMPS = {
    "TRL": {
        "prompt_ids": [[1, 2, 3], [0, 4, 5]], "prompt_mask": [[1, 1, 1], [0, 1, 1]], "completion_ids": IDS,
        "completion_mask": MASK, "sampling_per_token_logps": ROWS, "old_per_token_logps": TRAINED,
    },
    "verl": {
        "prompts": [[1, 2, 3], [0, 4, 5]], "responses": IDS, "response_mask": MASK,
        "attention_mask": [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]], "rollout_log_probs": ROWS,
        "old_log_probs": TRAINED,
    },
}


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
@pytest.mark.parametrize("as_tensors", [True, False])
def test_a_dump_of_a_trainer_holds_both_sides(dump, as_tensors, tmp_path):
    if as_tensors:
        read = [adapters.of(dump).frame([{key: torch.tensor(of) for key, of in dump.items()}], side)
                for side in ("rollout", "trainer")]
    else:
        (tmp_path / "dump.json").write_text(json.dumps(dump, indent=1))
        read = [tables.read(tmp_path / "dump.json", side) for side in ("rollout", "trainer")]
    pd.testing.assert_frame_equal(read[0], EXPECTED)
    pd.testing.assert_frame_equal(read[1], EXPECTED.assign(logprob=EXPECTED["logprob"] - 0.5))


def vllm(prompt: int, places: list[dict[int, float]]) -> SimpleNamespace:
    """Make what `LLM.generate` returns; the sampled token is the first at each place."""
    logprobs = [{token: SimpleNamespace(logprob=of, rank=1) for token, of in place.items()} for place in places]
    output = SimpleNamespace(index=0, token_ids=[next(iter(place)) for place in places], logprobs=logprobs)
    return SimpleNamespace(request_id="9", prompt_token_ids=list(range(prompt)), outputs=[output])


def test_what_vllm_returns_is_a_table_with_its_likeliest_tokens(tmp_path):
    outputs = [vllm(3, PLACES[0]), vllm(2, PLACES[1])]
    read = adapters.VLLM.frame(outputs)
    pd.testing.assert_frame_equal(read[list(EXPECTED)], EXPECTED)
    assert read["top_tokens"].tolist() == [[11, 7], [12, 7], [13], [14, 7], [15, 7]]
    (tmp_path / "dump.json").write_text(json.dumps(outputs, default=vars))
    pd.testing.assert_frame_equal(tables.read(tmp_path / "dump.json"), read)


def test_chat_and_completions_of_an_openai_compatible_server_are_tables():
    content = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -1.0}]},
               {"token": "b", "logprob": -2.0, "bytes": [98], "top_logprobs": [{"token": "c", "logprob": -0.5}]}]
    usage = {"prompt_tokens": 3}
    chat = {"object": "chat.completion", "choices": [{"index": 0, "logprobs": {"content": content}}], "usage": usage}
    plain = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"a": -1.0}, {"c": -0.5}]}
    completions = {"object": "text_completion", "choices": [{"index": 0, "logprobs": plain}], "usage": usage}
    one, other = (adapters.of(response).frame([response]) for response in (chat, completions))
    pd.testing.assert_frame_equal(one, other)
    assert one["position"].tolist() == [3, 4]
    assert one["logprob"].tolist() == [-1.0, -2.0]


def test_the_rule_is_printed_where_it_is_written():
    for constant in ("FLOOR", "PLAIN", "WITHIN", "FAR"):
        assert f"`{constant}`" in verdict.__doc__
        assert hasattr(verdict, constant)


# The measures, against sums over a whole vocabulary and against known values.

ROLLOUT, TRAINER = np.log(np.random.default_rng(45).dirichlet(np.full(12, 2.0), size=2))
LOG_RATIO = TRAINER - ROLLOUT
KL = float((np.exp(ROLLOUT) * -LOG_RATIO).sum())


def expected(name: str) -> float:
    """Take the mean of a term over the rollout's own distribution."""
    return float((np.exp(ROLLOUT) * measures.TERMS[name](LOG_RATIO)).sum())


def test_equal_log_probabilities_have_ratio_one_and_no_distance():
    found = measures.summary(np.zeros(6), [0, 0, 0, 1, 1, 1])
    ones = {"mean_exp_abs", "effective_share", "sequence_effective_share"} | {
        name for name in found if name.startswith("sequence_ratio")
    }
    assert found == {name: float(name in ones) for name in found}


def test_k1_k3_and_chi_squared_have_the_divergence_as_their_mean_over_all_tokens_and_control_k2_has_a_bias():
    divided = np.square(np.exp(TRAINER) - np.exp(ROLLOUT)) / np.exp(ROLLOUT)
    assert [expected(name) for name in ("k1", "k3", "chi_squared")] == pytest.approx([KL, KL, divided.sum()])
    assert expected("k2") != pytest.approx(KL)


def test_k3_of_a_tiny_difference_keeps_its_digits():
    assert measures.k3(1e-7) == pytest.approx(0.5e-14, rel=1e-6)


@pytest.mark.parametrize(("ratio", "narrow", "clip"), [
    (1.09, 0, 0), (0.89, 1, 0), (1.11, 1, 0), (0.79, 1, 1), (1.21, 1, 1),
])
def test_a_ratio_is_outside_by_its_distance_from_one_on_both_sides(ratio, narrow, clip):
    found = measures.summary([np.log(ratio)], ["a"])
    assert (found["outside_narrow"], found["outside_ppo_clip"]) == (narrow, clip)


def test_the_ratio_of_a_sequence_is_the_product_of_its_tokens_wherever_they_stand():
    sums = measures.of_sequences(np.log([2.0, 3.0, 5.0, 7.0]), ["b", "a", "b", "a"])
    assert np.exp(sums) == pytest.approx([21.0, 10.0])


def test_one_weight_that_outweighs_all_leaves_one_effective_sample():
    assert measures.effective_share([900.0, 0.0, 0.0, 0.0]) == 0.25
    assert measures.effective_share(np.minimum([900.0, 0.0, 0.0, 0.0], np.log(2))) > 0.75


def test_a_term_has_a_number_for_each_token():
    assert {term(LOG_RATIO).shape for term in measures.TERMS.values()} == {LOG_RATIO.shape}


# Signatures of faults, on recorded rows of the real model: each is named, and rounding is not.

FAULTS = score_judged.faults()
FOLDER = paths.DATA / "scores"
# Cases of the recorded rows, each called by its signature's name.
NAMED = (
    "shift", "stale", "special", "wrong_from", "left_padding", "processed: top-p 0.9", "processed: top-k 20",
    "temperature", "template", "low_precision",
)


@pytest.mark.parametrize("name", NAMED)
def test_a_fault_on_the_real_model_is_named_by_its_signature(name):
    found = score_judged.case(FAULTS[name, "float32"])
    assert (found.verdict, found.causes[0].key) == ("fault", name.partition(":")[0])
    assert found.suspicious


@pytest.mark.parametrize("other", ["trainer", "rollout"])
def test_another_tokenizer_is_named_by_the_ids_alone(other):
    rows = FAULTS["clean", "float32"]
    a, b = (rows[["id", "position", "token"]].assign(logprob=rows[side]) for side in ("rollout", other))
    found = score_judged.outcome.of(score_judged.tables.join(a, b.assign(token=b["token"] + (b["position"] > 60))))
    assert (found.verdict, [cause.key for cause in found.causes]) == ("fault", ["template"])
    assert (found.n_suspicious, found.suspicious[0].position > 60) == ((rows["position"] > 60).sum(), True)


def test_every_signature_has_a_case_and_says_what_it_cannot_be_told_apart_from():
    assert {signature.key for signature in signatures.SIGNATURES} == {name.partition(":")[0] for name in NAMED}
    assert all(signature.not_apart_from and signature.remedy for signature in signatures.SIGNATURES)


@pytest.mark.parametrize("control", [True, False])
def test_control_rounding_of_a_cache_on_the_same_texts_has_no_signature(control):
    found = score_judged.case(FAULTS["clean", "float32"], control)
    assert (found.verdict, found.causes) == ("rounding", [])


def test_a_stale_policy_needs_two_steps():
    rows = FAULTS["stale", "float32"]
    one = rows[rows["step"] == rows["step"].max()].reset_index(drop=True)
    assert "stale" not in [cause.key for cause in score_judged.case(one).causes]


# Thresholds, approached from both sides: what each pattern needs, as a difference of A's tokens from B's.

nth = np.arange(N * LONG)
place, sequence = nth % LONG, nth // LONG
last = place == LONG - 1
# As many up as down.
up_down = np.where(place % 2 == 0, 1.0, -1.0)
# A's largest is far below 0, so that no difference takes it above.
low = A["logprob"].to_numpy() - 9
# The first prompt is the longest; the others are padded.
positions = place + np.where(sequence == 0, 20, 10)
confident = np.where(place < 6, -0.1 - 0.01 * place, -3.0 - 0.1 * place)


def seen(signature: Callable, difference: np.ndarray, b: np.ndarray = low, control: float = 0.0, **columns) -> bool:
    """Tell whether a signature is seen where A differs from B by this much; a control differs from B at every token."""
    one, other = (A.assign(logprob=values, **columns) for values in (b + difference, b))
    controls = [other.assign(logprob=b + control * up_down)] if control else []
    found = verdict.gaps(tables.join(one, other, controls))
    return bool(signature(found))


def likeliest(times: np.ndarray) -> bool:
    """Tell whether a temperature is seen where the likeliest tokens lie so many times as far apart in A."""
    tops = [np.outer(of, [-0.5, -1.5, -3.0]).tolist() for of in (times, np.ones(len(A)))]
    one, other = (A.assign(top_tokens=[[1, 2, 3]] * len(A), top_logprobs=values) for values in tops)
    return bool(signatures._temperature(verdict.gaps(tables.join(one, other))))


@pytest.mark.parametrize(("holds", "beyond", "short"), [
    (lambda x: seen(signatures._shift, np.where(place % 2, 1.0, -1.0) - x, low[0] - place % 2), 0.19, 0.21),
    (lambda x: seen(signatures._stale, np.where(sequence < 4, x, 0.3), step=sequence // 4), 0.099, 0.101),
    (lambda x: seen(signatures._stale, np.where(sequence < 4, 0.01, 0.3), step=sequence // 4 if x else 0), True, False),
    # Suspicious tokens that are not the last ones; last ones that are suspicious.
    (lambda x: seen(signatures._special, np.where(last | (nth < x), 1.0, 0), control=0.01), 0, 1),
    (lambda x: seen(signatures._special, np.where(last & (sequence < x), 1.0, 0), control=0.01), 4, 3),
    # Tokens of one kind: no more than a quarter of all, and three at least.
    (lambda x: seen(signatures._special, 1.0 * (nth < x), control=0.01, token=np.where(nth < x, -1, nth)), 24, 25),
    (lambda x: seen(signatures._special, 1.0 * (nth < x), control=0.01, token=np.where(nth < x, -1, nth)), 3, 2),
    # Before and after a place, and how many are beyond the limit after it.
    (lambda x: seen(signatures._from_a_position, np.where(place < 6, x, 0.5), control=0.03), 0.099, 0.101),
    (lambda x: seen(signatures._from_a_position, 0.5 * ((place > 5) & (sequence * 6 + place < 6 + x))), 13, 12),
    # How many sequences have tokens before it.
    (lambda x: seen(signatures._from_a_position, np.where((sequence < x) & (place < 6), 0, 0.5), control=0.01,
                    position=place + np.where(sequence < x, 0, 100)), 3, 2),
    (lambda x: seen(signatures._by_padding, np.where(sequence == 0, x, 0.5), position=positions), 0.099, 0.101),
    (lambda x: seen(signatures._by_padding, np.where(sequence < x, 0.01, 0.5),
                    position=place + np.where(sequence < x, 20, 10)), 4, 5),
    # On the other side, the largest and all together; how many move; and by how much at most.
    (lambda x: seen(signatures._one_sided, np.where(place < 4, 0.1, np.where(place < 6, -x, 0))), 0.024, 0.026),
    (lambda x: seen(signatures._one_sided, np.where(nth < 6, 1.0, np.where(nth < 46, -x, 0))), 0.029, 0.031),
    (lambda x: seen(signatures._one_sided, np.where(nth < x, 0.1, 0)), 5, 4),
    (lambda x: seen(signatures._one_sided, np.where(place < 4, x, 0)), 2.99, 3.01),
    (lambda x: seen(signatures._temperature, (x - 1) * confident + 0.02, confident), 1.035, 1.025),
    (lambda x: seen(signatures._temperature, 0.06 * confident + 0.1 + x * up_down * (place > 5), confident, 1e-3),
     0.9, 1.0),
    (lambda x: likeliest(np.full(N * LONG, x)), 1.021, 1.019),
    (lambda x: likeliest(1.04 + x * (nth % 3 - 1)), 0.0099, 0.0101),
    (lambda x: seen(signatures._early, np.where(place < 4, x, 1.0) * 0.1 * up_down), 1.21, 1.19),
    (lambda x: seen(signatures._early, np.where(place < 4, np.exp(0.4 + x * (-1.0) ** sequence), 1.0) * 0.1 * up_down),
     0.28, 0.3),
    # One large token, one sequence that differs more, and a side.
    (lambda x: seen(signatures._even, np.where(nth == 0, x, 1.0) * 0.01 * up_down), 17, 18),
    (lambda x: seen(signatures._even, np.where(sequence == 0, x, 1.0) * 0.01 * up_down), 5.9, 6.1),
    (lambda x: seen(signatures._even, np.where(nth < x, 0.01, -0.01)), 67, 68),
    (lambda x: seen(signatures._even, x * up_down), 0.29, 0.31),
    (lambda x: seen(signatures._even, x * up_down), 1.1e-5, 0.9e-5),
])
def test_a_pattern_is_seen_just_beyond_its_threshold_and_not_just_short_of_it(holds, beyond, short):
    assert (holds(beyond), holds(short)) == (True, False)


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
    snippet = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
    output = vllm(2, [{5: -1.0, 6: -0.5}, {6: -0.5, 5: -1.0}])
    llm = SimpleNamespace(generate=lambda prompts, how: [output] * len(prompts))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda name: llm, SamplingParams=dict))
    monkeypatch.chdir(tmp_path)
    exec(snippet, {"name": "model", "prompts": ["a", "b"]})
    assert score_judged.tables.read("rollout.jsonl")["logprob"].tolist() == [-1.0, -0.5] * 2
