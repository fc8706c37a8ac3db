"""`kvbook check --memory`, and chapters: streamed weights give the rows that a model in memory gives, in every bit."""

import re
import shutil

import pytest
import torch
import transformers
from refusing import refusal
from small_models import LLAMAS, SMALL, asked, lose_a_weight

from kvbook.diagnosis import check, kept_calls, layerwise, probe
from kvbook.measuring import costs, in_fp64
from kvbook.models import corpus, loading, sources, streamed
from kvreport.chapters.bug_or_rounding import symptoms
from kvreport.chapters.layer_drift import LayerDriftSettings
from kvreport.running import catalogue

WIDE = {**SMALL, **LLAMAS, "num_hidden_layers": 3, "max_position_embeddings": 64}
MODELS = {
    "llama": transformers.LlamaConfig(**WIDE, tie_word_embeddings=False),
    "tied and sharded qwen2": transformers.Qwen2Config(**WIDE, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(**SMALL, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2),
    "mpt, no cache by default": transformers.MptConfig(**SMALL, d_model=32, n_heads=4, n_layers=3, max_seq_len=64),
    "gemma3, a window of 5": transformers.Gemma3TextConfig(**WIDE, head_dim=8, sliding_window=5, layer_types=None),
    "experts": transformers.MixtralConfig(**WIDE, num_local_experts=4),
}
DTYPES = ("float64", "float32", "bfloat16")
TEXTS = [corpus.Sample(index, "file", 0, list(range(11 + index, 19 + index))) for index in range(2)]


def saved(name, to):
    torch.manual_seed(5)
    shards = {"max_shard_size": "20KB"} if "sharded" in name else {}
    loading.from_config(MODELS[name], torch.bfloat16).save_pretrained(to, **shards)
    return to


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory.mktemp("model"))


def opened(folder, dtypes=DTYPES):
    where = sources.resolve(str(folder), "stand-in")
    source = streamed.source_of(where, 0)
    return {dtype: streamed.Streamed(where.config, getattr(torch, dtype), source) for dtype in dtypes}


def in_memory(folder, dtype, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    in_fp64.experts_one_by_one(model)
    return list(probe.rows_of(model, dtype, TEXTS, together=4, **options))


def layer_by_layer(models, to, done=lambda _part: None):
    return layerwise.rows_of(models, TEXTS, 0, done, kept_calls.KeptCalls(to / "kept.safetensors"), {})[0]


def test_rows_of_streamed_weights_are_equal_in_every_bit_to_those_of_a_model_in_memory(folder, tmp_path):
    parts = []
    models = opened(folder)
    for each in models.values():
        in_fp64.experts_one_by_one(each.model)
    assert layer_by_layer(models, tmp_path, parts.append) == {dtype: in_memory(folder, dtype) for dtype in DTYPES}
    # Where no cache comes back, the last parts are fed once more by themselves.
    assert len(parts) <= 2 * len(set(parts)) + 2, "a part is not read again for each call"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return saved("llama", tmp_path_factory.mktemp("llama"))


def test_a_cache_that_is_switched_off_is_measured_on_and_off_in_one_reading_of_the_weights(tmp_path):
    parts, models = [], opened(saved("mpt, no cache by default", tmp_path), ["float32"])
    kept = kept_calls.KeptCalls(tmp_path / "kept.safetensors")
    off, on = layerwise.rows_of(models, TEXTS, 0, parts.append, kept, {}, {"use_cache": True})
    assert len(parts) <= len(set(parts)) + 1
    assert off["float32"] == in_memory(tmp_path, "float32")
    assert on["float32"] == in_memory(tmp_path, "float32", use_cache=True)
    assert {row["held"] for row in off["float32"]} == {0}
    assert all(row["held"] for row in on["float32"])


def test_control_other_weights_of_one_layer_give_other_rows(made, tmp_path, monkeypatch):
    models = opened(made, ["float32"])
    stock = streamed.Checkpoint.load

    def load(source, model, part):
        found = stock(source, model, part)
        return {name: value * (1.01 if part.endswith("layers.1") else 1) for name, value in found.items()}

    monkeypatch.setattr(streamed.Checkpoint, "load", load)
    assert layer_by_layer(models, tmp_path)["float32"] != in_memory(made, "float32")


def test_control_a_cache_whose_lengths_are_foreseen_wrongly_is_refused_or_shows(made, tmp_path, monkeypatch):
    stock = layerwise.Call.fed_before
    monkeypatch.setattr(layerwise.Call, "fed_before", lambda call: stock(call)[1:])
    with pytest.raises(layerwise.NotLayerByLayer, match="other lengths than were foreseen"):
        layer_by_layer(opened(made, ["float32"]), tmp_path)


def test_one_part_is_in_memory_at_a_time_and_a_use_of_any_other_gives_nan(made, tmp_path):
    models = opened(made, ["float32"])
    model, there = models["float32"].model, []

    def look(_part):
        there.append([name for name, value in model.named_parameters() if value.untyped_storage().nbytes() > 4])

    found = layer_by_layer(models, tmp_path, look)
    assert not any(there)
    assert model.model.embed_tokens.weight.isnan().all()
    with models["float32"].holding("model.layers.1"):
        look("")
    assert len(there[-1]) == 9
    assert all(name.startswith("model.layers.1.") for name in there[-1])
    assert all(row["drift"] < 1e-4 for row in found["float32"])


def test_a_run_that_was_stopped_goes_on_at_its_last_layer_and_gives_the_same_rows(made, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_calls, "_SECONDS", 0.0)
    want, parts = in_memory(made, "float32"), []

    def stop(part):
        parts.append(part)
        if part == "model.layers.2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        layer_by_layer(opened(made, ["float32"]), tmp_path, stop)
    again = []
    assert layer_by_layer(opened(made, ["float32"]), tmp_path, again.append)["float32"] == want
    assert (parts[0], again[0]) == ("model.embed_tokens", "model.layers.2")
    assert not list(tmp_path.iterdir()), "what was kept is deleted at the end"


def test_random_weights_are_those_of_their_seed_whatever_is_drawn_before_them(made):
    config = sources.resolve(str(made), "stand-in").config

    def layer(seed, *before):
        one = streamed.Streamed(config, torch.float32, streamed.Drawn(seed))
        for part in (*before, "model.layers.1"):
            with one.holding(part):
                found = one.model.model.layers[1].mlp.up_proj.weight.clone()
        return found

    assert torch.equal(layer(3), layer(3, "lm_head", "model.layers.0"))
    assert not torch.equal(layer(3), layer(4))
    assert 0.15 < layer(3).std() < 0.25


@pytest.mark.parametrize("release", ["5.0", "5.10"])
def test_early_releases_whose_loader_takes_its_plans_apart_stream_too(made, tmp_path, monkeypatch, release):
    stock, seen = streamed.checkpoints.convert_and_load_state_dict_in_model, []

    def of_5_10(model, state_dict, load_config, tp_plan, disk_offload_index=None):
        seen.append(load_config.dtype_plan)
        return stock(model, state_dict, load_config)

    def of_5_0(model, state_dict, load_config, tp_plan, dtype_plan=None, disk_offload_index=None):
        return of_5_10(model, state_dict, load_config, tp_plan)

    want = in_memory(made, "float32")
    monkeypatch.setattr(
        streamed.checkpoints, "convert_and_load_state_dict_in_model", of_5_0 if release == "5.0" else of_5_10
    )
    if release == "5.0":
        monkeypatch.delattr(streamed.PreTrainedModel, "_get_dtype_plan")
    assert layer_by_layer(opened(made, ["float32"]), tmp_path)["float32"] == want
    assert seen


# The command.


def told(found):
    return found.model_dump(exclude={"seconds", "not_tried"})


def test_the_check_says_the_same_with_and_without_streaming(llama_folder, text_folder):
    whole, parts = (check.check(asked(llama_folder, text_folder, memory=memory)) for memory in (None, "2GB"))
    assert told(whole) == told(parts)


def test_the_memory_of_a_large_model_is_said_of_the_dtypes_that_fit_and_not_where_none_does(
    llama_folder, text_folder, monkeypatch, capfd
):
    monkeypatch.setattr(layerwise, "LARGE", 1)
    check.check(asked(llama_folder, text_folder, memory="2GB"))
    assert "kvbook: float32, float64 at once take about " in capfd.readouterr().err
    refusal(lambda: check.check(asked(llama_folder, text_folder, memory="1MB")))
    assert "at once" not in capfd.readouterr().err


def test_a_model_whose_cache_lengths_cannot_be_foreseen_is_checked_step_by_step(save, text_folder, capfd):
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=2)
    folder = save(loading.from_config(config, torch.float32), "mamba")
    given = {"n_samples": 1, "n_tokens": 6, "dtypes": "float32"}
    whole, parts = (check.check(asked(folder, text_folder, memory=memory, **given)) for memory in (None, "2GB"))
    assert told(whole) == told(parts)
    assert "every call reads all weights (its cache holds " in capfd.readouterr().err


@pytest.mark.parametrize(("changes", "words"), [
    ({"memory": "8"}, "write it as 8GB"),
    ({"memory": "1MB"}, "takes about .* GB, more than memory allows"),
    ({"memory": "8GB", "device": "mps"}, "leave device out"),
])
def test_what_cannot_be_streamed_is_refused_in_one_line(llama_folder, text_folder, changes, words):
    assert re.search(words, refusal(lambda: check.check(asked(llama_folder, text_folder, **changes))))


def test_what_a_part_lacks_is_named(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    lose_a_weight(tmp_path)
    said = refusal(layer_by_layer, opened(tmp_path, ["float32"]), tmp_path)
    assert "lacks weights of its language model (model.layers.1.self_attn.q_proj.weight, 1 in all)" in said


# Chapters.


@pytest.fixture
def in_little_memory(monkeypatch):
    """Let models of a few kilobytes be too large, and count how many parts they read."""
    monkeypatch.setattr(costs, "check_streamed", lambda *_asked: None)
    # Never streamed, it would be measured twice.
    monkeypatch.setattr(symptoms, "of_the_scratch_model", lambda *_asked: ())
    read, stock = [], streamed.Streamed.holding
    monkeypatch.setattr(streamed.Streamed, "holding", lambda one, part: read.append(part) or stock(one, part))
    return read


def test_settings_without_a_limit_are_those_of_runs_that_were_recorded_before_there_was_one():
    assert "memory" not in LayerDriftSettings().model_dump(mode="json", include={"memory", "seed"})
    assert LayerDriftSettings.checked(memory="8GB").model_dump(mode="json", include={"memory"}) == {"memory": 8e9}
    assert LayerDriftSettings.from_notebook({"memory": "8GB"}).memory == 8e9


# Of each chapter the experiments that can be streamed, the families' checkpoints that these are given, and settings.
CHAPTERS = {
    "layer drift": (
        ("layer_drift", "greedy_paths", "layer_drift_lengths"), {"model": ["llama"], "reference_model": ["gpt2"]},
        {"n_samples": 2, "n_tokens": 8, "n_new_tokens": 4, "dtypes": "float64,bfloat16"},
    ),
    # A causal model and a masked one.
    "bug or rounding": (
        ("bug_or_rounding", "first_bad_layer"), {"model": ["llama"], "families": ["roberta"]},
        {"n_samples": 1, "n_tokens": 12, "dtypes": "float64,bfloat16"},
    ),
    "the blog post": (
        ("past_tables",), {"model": ["gpt2"], "families": ["roberta", "mpt", "falcon"]},
        {"n_samples": 1, "n_tokens": 8, "quantizations": "none"},
    ),
}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_measures_equal_rows_in_little_memory(chapter, family_folders, text_folder, in_little_memory):
    experiments, checkpoints, given = CHAPTERS[chapter]
    folders = {name: ",".join(str(family_folders[one]) for one in of) for name, of in checkpoints.items()}
    given = given | folders | {"corpus": str(text_folder)}
    for experiment in map(catalogue.EXPERIMENTS.get, experiments):
        want = experiment.run(experiment.settings.checked(**given))
        assert not in_little_memory
        found = experiment.run(experiment.settings.checked(**given, memory="0.001MB"))
        assert found.rows.equals(want.rows)
        assert found.hash != want.hash
        assert in_little_memory, "the control: weights were streamed"
        in_little_memory.clear()


def test_with_a_limit_mitigations_are_left_out_and_quantized_weights_are_refused():
    mitigations, tables = (catalogue.EXPERIMENTS[name] for name in ("mitigations", "past_tables"))
    assert mitigations.run(mitigations.settings.checked(memory="1GB")) is None
    assert "quantizations=none" in refusal(tables.run, tables.settings.checked(memory="1GB"))


def test_a_chapter_refuses_a_part_that_is_larger_than_its_memory_before_it_begins(llama_folder, text_folder):
    given = {"model": str(llama_folder), "reference_model": str(llama_folder), "corpus": str(text_folder)}
    settings = LayerDriftSettings.checked(**given, n_samples=1, n_tokens=8, memory="0.1MB")
    said = refusal(catalogue.EXPERIMENTS["layer_drift"].run, settings)
    assert re.search("the largest part in float32 takes about .* more than memory allows", said)
