"""The atlas: its rules build what they claim, its columns tell a sound cache from a wrong one, a killed run goes on."""

import json
import signal
from unittest import mock

import pytest
import torch
from refusing import refusal
from small_models import generated
from transformers import CONFIG_MAPPING

from kvbook.atlas import LENGTH, PATHS, RIGHT, WHOLE, badges, columns, configurations, invariance, running, table
from kvbook.diagnosis import execution_paths
from kvbook.diagnosis.feeding import Fed
from kvbook.exact import row_invariant


@pytest.fixture(autouse=True)
def one_text(monkeypatch):
    """Try each path on one text; a second one takes as long and shows the same."""
    monkeypatch.setattr(columns._tried, "__defaults__", (1, *columns._tried.__defaults__[1:]))


def alone(*paths):
    """Leave the atlas only some of its paths."""
    return mock.patch.object(execution_paths, "PATHS", [one for one in execution_paths.PATHS if one.name in paths])


def tried(name, *paths):
    """Try some of an architecture's paths as they are, and judge them."""
    with torch.inference_mode(), alone(*paths):
        found = columns._as_it_is(name, "cpu")
    return table.judged({"architecture": name, "status": "ran", "cache": "DynamicCache", "causal": True} | found)


def test_every_kind_of_layer_is_kept_and_the_last_stays_last():
    kinds = ["linear"] * 7 + ["full"] + ["linear"] * 7 + ["sliding"]
    assert configurations.kept_layers([kinds]) == [0, 1, 7, 15]
    assert configurations.kept_layers([kinds, list(range(16))]) == list(range(16)), "every layer is a kind of its own"
    # A list of the layers' numbers keeps none: else each of its 48 layers would be a kind of its own.
    config = configurations.configuration("llama4_text")
    assert config.layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    assert config.moe_layers == [0, 1, 2, 3]


@pytest.mark.parametrize(("kinds", "names"), [
    ("conv full_attention", "lfm2 lfm2_moe"),
    ("sliding_attention full_attention", "qwen2 smollm3 ministral cohere_compass_text gemma2"),
    ("hybrid hybrid_sliding", "zaya"),
    ("sliding_attention compressed_sparse_attention heavily_compressed_attention", "deepseek_v4"),
])
def test_layers_are_of_each_kind_that_a_class_has(kinds, names):
    for name in names.split():
        assert set(configurations.configuration(name).layer_types) == set(kinds.split()), name


def test_the_installed_transformers_is_listed_whole():
    assert len(configurations.names()) > 150
    assert set(configurations.names()) <= set(CONFIG_MAPPING)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "deepseek_v3", "mixtral", "bamba", "whisper", "bert"])
def test_what_is_built_is_small_runs_and_wants_no_gradient(name):
    model = configurations.build(name)
    assert model.num_parameters() < 2e6
    assert not any(weight.requires_grad for weight in model.parameters())
    with torch.inference_mode():
        logits = model(configurations.text(9)).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.1, "a model whose layers do nothing shows no bug"


@pytest.mark.parametrize("name", ["mistral", "gemma2", "cohere2", "gpt_oss"])
def test_windows_are_shorter_than_the_text(name):
    assert configurations.configuration(name).sliding_window == configurations.WINDOW < LENGTH / 2


def test_latent_attention_keeps_unequal_head_widths():
    config = configurations.configuration("deepseek_v3")
    assert config.qk_nope_head_dim + config.qk_rope_head_dim != config.v_head_dim


@pytest.fixture
def placed(monkeypatch):
    """Note where models and texts are put; what is asked for on CUDA is computed here."""
    places, build, to = [], configurations.build, torch.Tensor.to

    def noted(tensor, *arguments, **options):
        places.extend(each for each in arguments if each == "cuda")
        return to(tensor, *(("cpu" if each == "cuda" else each) for each in arguments), **options)

    monkeypatch.setattr(configurations, "build", lambda *a, device="", **b: places.append(device) or build(*a, **b))
    monkeypatch.setattr(torch.Tensor, "to", noted)
    return places


def test_a_sound_architecture_is_rounding_or_exact_on_every_path_and_exact_when_row_invariant_where_asked_for(placed):
    row = invariance.measure("qwen2", "cuda")
    assert (row["status"], set(placed)) == ("ran", {"cuda"})
    assert not row.keys() & set(PATHS), "a row records, and verdicts are given when it is read"
    row = table.judged(row)
    # A window counts the padding among its keys.
    assert row[RIGHT] == "full pass changes"
    assert {row[path] for path in PATHS if path not in (WHOLE, RIGHT)} <= {"rounding", "exact"}
    assert row[WHOLE] == "prompt fed twice"
    assert row["row_invariant"] == "exact"
    assert row["cache"] == "DynamicCache"
    assert table.verdict(row) == "rounding"
    json.dumps(row)


def test_a_static_cache_that_a_class_does_not_declare_is_wrong_all_the_same_and_generate_takes_it():
    with alone("static cache", "chunks", "token by token"):
        row = columns.measure("gpt_neo")
    assert row["static cache, declared"] is False
    row = table.judged(row)
    assert row["static cache"] == table.verdict(row) == "bug"
    assert table.faults(row) == ["static cache: wrong from token 0 (not declared)"]
    assert "bug (static cache, not declared)" in badges.words(row | running.versions())
    model, ids = configurations.build("gpt_neo"), configurations.text(LENGTH)
    written = [generated(model, ids, 4, cache_implementation=name).sequences for name in ("dynamic", "static")]
    assert not torch.equal(*written)


AT_ONCE, STEPWISE = "left padding", "left padding, token by token"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "outcomes", "verdict", "faults"), [
    # From the first position beyond its window.
    ("moshi", {"token by token": "bug"}, "bug", [f"token by token: wrong from token {configurations.WINDOW}"]),
    # Its full pass alone masks padding; TrOCR's full pass changes with padding, which is not its cache's fault.
    ("git", {AT_ONCE: "rounding", STEPWISE: "bug"}, "bug", [f"{STEPWISE}: wrong from token 2"]),
    ("trocr", {"chunks": "rounding", AT_ONCE: "full pass changes", STEPWISE: "full pass changes"}, "rounding", []),
    # These give logits of fp32 in bf16; Mamba takes no positions.
    ("beam", {AT_ONCE: "rounding", STEPWISE: "rounding"}, "rounding", []),
    ("mamba", {AT_ONCE: "rounding", STEPWISE: "rounding"}, "rounding", []),
    ("deepseek_v4", {"chunks": "rounding", "static cache": "raises an error", "cropped": "raises an error"},
     "raises an error", ["static cache raises KeyError", "cropped raises RuntimeError"]),
])
def test_each_path_has_its_outcome_and_the_worst_is_the_verdict(name, outcomes, verdict, faults):
    row = tried(name, *outcomes)
    assert {path: row[path].replace("exact", "rounding") for path in outcomes} == outcomes
    assert table.verdict(row) == verdict
    assert table.faults(row) == faults


# Mamba's cache counts no tokens, and its tokens are right by chance.
# Llama 4's chunks hide it where they end with the prompt.
@pytest.mark.parametrize("name", ["llama", "mamba", "llama4_text"])
def test_a_prompt_that_is_cached_whole_is_fed_twice_and_its_logits_are_wrong(name):
    row, ids = tried(name, WHOLE), configurations.text(LENGTH)
    assert row[WHOLE] == "prompt fed twice"
    assert row[f"{WHOLE}, tokens fed"] == row[f"{WHOLE}, first wrong position"] + 1 == LENGTH - 1
    fed = columns.look_at(configurations.build(name))
    # Control: without such a cache it is right.
    alone = generated(fed.model, ids, 1, output_logits=True).logits[0]
    assert (alone - fed.full(ids)[:, -1]).abs().max() < 1e-4


SOUND = {"float64": [1e-15, 2e-15], "float32": [1e-7, 1e-7]}


@pytest.mark.parametrize(("recorded", "outcome"), [
    ({"drift": SOUND}, "rounding"), ({"drift": SOUND | {"float64": [1e-15, 0.5]}}, "bug"),
    ({"drift": {"float64": [0.0], "bfloat16": [0.0]}}, "exact"), ({"drift": {"bfloat16": [0.3, 0.4]}}, "undecided"),
    ({"drift": SOUND, "error": {"bfloat16": "RuntimeError: x"}}, "raises an error"),
    ({"drift": {"float64": [0.5]}, "error": {"bfloat16": "RuntimeError: x"}}, "bug"),
    ({"drift": SOUND, "not tried": {"bfloat16": "no such kernel"}}, "rounding"),
    ({"not tried": {"bfloat16": "no cache is returned"}}, "not applicable"), ({}, "not recorded there"),
])
def test_the_outcome_of_a_path_is_the_worst_over_dtypes_and_one_dtypes_failure_hides_no_other(recorded, outcome):
    row = {"status": "ran", "cache": "DynamicCache", "causal": True}
    assert table.judged(row | {f"chunks, {what}": of for what, of in recorded.items()})["chunks"] == outcome


def test_control_logits_that_are_no_numbers_are_a_bug_and_not_left_out(monkeypatch):
    stock = Fed.in_parts
    monkeypatch.setattr(
        Fed, "in_parts", lambda self, *given: (stock(self, *given)[0].index_fill(1, torch.tensor([9]), torch.nan), None)
    )
    row = tried("gpt2", "chunks")
    assert row["chunks"] == "bug"
    assert row["chunks, first wrong position"] == 9


# GPT-Neo adds two masks up, and its padding's keys were no numbers; MOSS hands positions on without naming them.
@pytest.mark.parametrize("name", ["llama", "gpt_neo", "moss_transcribe_diarize"])
def test_row_invariance_makes_a_padded_text_on_a_cache_bitwise_exact(name):
    ids = configurations.text(LENGTH)
    with torch.inference_mode(), row_invariant():
        fed = columns.look_at(configurations.build(name))
        assert torch.equal(*fed.padded_in_parts(ids, 0, execution_paths.steps(LENGTH)))


@pytest.mark.parametrize("name", ["gpt2", "mamba2", "xlnet", "prophetnet"])
def test_a_class_whose_own_full_pass_changes_with_what_follows_is_not_accused(name):
    causal = name in ("gpt2", "mamba2")
    with torch.inference_mode():
        assert columns.is_causal(columns.look_at(configurations.build(name)), configurations.text(12)) is causal


def test_a_killed_run_goes_on_and_what_fails_takes_too_long_or_too_much_memory_is_a_row(tmp_path, monkeypatch):
    def measure(name, device):
        if name == "gpt2":
            raise RuntimeError("no such\nluck")
        while name == "opt":
            signal.pause()
        torch.empty(2**31 if name == "mpt" else 1)
        return {"status": "ran", "cache": "none", "causal": True}

    monkeypatch.setattr(columns, "measure", measure)
    path = tmp_path / "rows.jsonl"
    assert len(list(running.run(["gpt2", "llama"], path))) == 2
    with path.open("a") as file:
        file.write('{"architecture": "mis')
    went_on = running.run(["gpt2", "llama", "opt", "mpt"], path, seconds=2)
    assert {row["architecture"] for row in went_on} == {"opt", "mpt"}
    found = running.finished(path)
    statuses = {name: row["status"] for name, row in found.items()}
    assert statuses == {"gpt2": "fails", "llama": "ran", "opt": "fails", "mpt": "fails"}
    assert found["gpt2"]["reason"] == "RuntimeError: no such luck"
    assert found["opt"]["reason"] == "took longer than allowed"
    assert "allocate memory" in found["mpt"]["reason"]


@pytest.mark.slow
def test_processes_forked_from_a_server_as_for_a_gpu_give_the_rows_of_forked_ones(monkeypatch):
    (forked,) = running.measured(["gpt2"], paths_only=True)
    server = running._context("cuda")
    assert server.get_start_method() == "forkserver"
    monkeypatch.setattr(running, "_context", lambda _: server)
    (served,) = running.measured(["gpt2"], paths_only=True)
    assert served | {"seconds": 0} == forked | {"seconds": 0}


@pytest.mark.parametrize(("row", "words"), [
    ({"architecture": "gpt2", "device": "cuda"} | running.versions(), "device cuda"),
    ({"architecture": "gpt2", "transformers": "4.0", "torch": "1.0"}, "4.0"),
    ([], "does not hold rows"),
])
def test_rows_of_another_device_or_other_versions_are_not_continued(tmp_path, row, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert words in refusal(running.finished, path)


ROWS = [
    {"architecture": "b", "status": "ran", "cache": "DynamicCache", "causal": True, "chunks": "bug",
     "chunks, first wrong position": 8, "batch": "exact", "row_invariant": "exact", "chunks, drift": {"float32": 0.1}},
    {"architecture": "a", "status": "fails", "reason": "ImportError: timm"},
    {"architecture": "c", "status": "ran", "cache": "none", "causal": True},
    {"architecture": "d", "status": "ran", "cache": "XCache", "causal": False, "batch": "bug"},
]


def test_the_table_names_the_worst_path_the_reason_and_the_counts():
    lines = table.text(ROWS).splitlines()
    assert lines[0].split() == ["a", "does", "not", "run", "ImportError:", "timm"]
    assert "bug" in lines[1]
    assert "chunks: wrong from token 8" in lines[1]
    assert [table.verdict(row) for row in ROWS] == ["bug", "does not run", "no cache", "not causal"]
    assert lines[-2].startswith("4 architectures: 1 ")
    assert lines[-1] == "under row_invariant(): 1 exact"


@pytest.mark.parametrize("suffix", table.FORMATS)
def test_the_table_is_written_whole_for_other_programs(tmp_path, suffix):
    path = tmp_path / f"atlas{suffix}"
    table.write(ROWS, path)
    assert list(tmp_path.iterdir()) == [path]
    assert "chunks, first wrong position" in path.read_text()
    assert ".csv" in refusal(table.write, ROWS, tmp_path / "atlas.xlsx")


@pytest.mark.parametrize(("arguments", "words"), [
    (["nosuch"], "nosuch"), (["Moshi"], "did you mean moshi?"),
    (["gpt2", "--to", "/proc/atlas.csv"], "cannot write to /proc"),
    (["gpt2", "--badges", "/proc/badges"], "cannot write to /proc"), (["gpt2", "--to", "atlas.xlsx"], ".csv"),
    (["--workers", "0"], "workers"), (["gpt2", "--device", "cuda:99"], "CUDA devices"),
])
def test_bad_input_of_the_command_is_refused_before_anything_is_measured(kvbook_here, arguments, words, tmp_path):
    done = kvbook_here("atlas", *arguments, "--rows", tmp_path / "rows.jsonl")
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_command_prints_each_row_once(kvbook_here, monkeypatch, tmp_path):
    monkeypatch.setattr(columns, "measure", lambda *_: {"status": "ran", "cache": "none", "causal": True})
    done = kvbook_here("atlas", "gpt2", "gpt2", "--rows", tmp_path / "rows.jsonl")
    assert (done.stdout + done.stderr).count("no cache ") == 1
    assert "1 architecture: 1 no cache" in done.stdout


def test_where_no_process_is_forked_one_line_says_so(monkeypatch):
    monkeypatch.delattr(running.os, "fork")
    assert "forked process" in refusal(lambda: list(running.measured(["gpt2"])))
