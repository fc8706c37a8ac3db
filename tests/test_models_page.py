"""The page on the models: what each writes, what the tables say, and where labels stand."""

import pytest
import torch
from refusing import refusal
from small_models import generated

from kvbook import paths
from kvbook.models import listing, loading, packages, registry, sources
from kvreport.chapters.models import ModelsSettings, greedy_samples, measures, rows, tables
from kvreport.publishing import found
from kvreport.publishing.found import Found
from kvreport.publishing.statements import check


@pytest.fixture(scope="module")
def results(family_folders):
    # One that has learnt to write, and two whose vocabulary is mostly without text.
    names = f"gpt2, {family_folders['falcon']}, {family_folders['roberta']}"
    return found.measured("models", ModelsSettings.checked(model=names, n_new_tokens=8, prompt="def f(x"))


@pytest.fixture
def written(results):
    return results["greedy_samples"]


def test_every_model_writes_as_many_tokens_as_asked_for(written):
    assert written.groupby("model").size().to_dict() == {"gpt2": 8, "small-falcon": 8, "small-roberta": 8}
    assert written["probability"].between(0, 1).all()
    assert written.groupby("model")["masked"].first().to_dict() == {"gpt2": 0, "small-falcon": 0, "small-roberta": 1}


def test_a_causal_model_writes_what_the_librarys_greedy_decoding_writes(written, family_folders):
    for name, model in (("gpt2", "gpt2"), (str(family_folders["falcon"]), "small-falcon")):
        loaded = loading.load(name)
        ids = loaded.tokenizer("def f(x", return_tensors="pt")["input_ids"]
        output = generated(loaded.model, ids, 8).sequences[0, ids.shape[1] :]
        assert written.loc[written["model"] == model, "token"].tolist() == output.tolist()


def test_a_masked_model_is_read_at_a_mask_after_the_text_and_nothing_stands_after_the_mask(written, family_folders):
    loaded = loading.load(str(family_folders["roberta"]))
    ids = loaded.tokenizer("def f(x")["input_ids"]
    assert ids[-1] == loaded.tokenizer.eos_token_id
    masked = torch.tensor([[*ids[:-1], loaded.tokenizer.mask_token_id]])
    with torch.inference_mode():
        first = loaded.model(masked).logits[0, -1].argmax().item()
    assert written.query("model == 'small-roberta' and step == 0")["token"].item() == first


def test_the_texts_pieces_make_the_text(results, written):
    tokens = written.query("model == 'gpt2'")["token"].tolist()
    assert results["samples"].set_index("model").loc["gpt2", "text"] == loading.tokenizer("gpt2").decode(tokens) != ""


def test_all_stands_for_every_family_and_nothing_for_none():
    assert greedy_samples.names(ModelsSettings(weights="hub")) == list(registry.families())
    assert greedy_samples.names(ModelsSettings()) == sources.families_with("stand-in")
    assert greedy_samples.names(ModelsSettings.checked(model="gpt2, mpt,gpt2")) == ["gpt2", "mpt"]
    assert "names no model" in refusal(lambda: greedy_samples.EXPERIMENT.run(ModelsSettings.checked(model=" , ")))


@pytest.mark.parametrize(("name", "here", "settings", "weights"), [
    ("smollm2", True, {}, ["stand-in", "package"]), ("smollm2", False, {}, ["stand-in"]),
    ("smollm2", True, {"model": "smollm2"}, ["stand-in"]), ("smollm2", True, {"weights": "random"}, ["random"]),
    ("gpt2", True, {}, ["stand-in"]),
])
def test_all_stand_ins_are_followed_by_the_trained_model_where_it_is_here(monkeypatch, name, here, settings, weights):
    monkeypatch.setattr(packages, "is_here", lambda family: here)
    assert greedy_samples.weights_of(ModelsSettings.checked(**settings), name) == weights


def test_the_architectures_are_the_published_ones():
    table = rows.architectures().set_index("hub id")
    assert table.loc["tiiuae/falcon-7b", ["layers", "width", "heads", "KV heads"]].tolist() == [32, 4544, 71, 1]
    assert table.loc["meta-llama/Llama-3.1-8B-Instruct", "KV heads"] == 8
    assert table.loc["mosaicml/mpt-7b", ["KV heads", "used by"]].tolist() == [32, "blog-past"]
    named = {name for names in table["used by"] for name in names.split(", ")}
    assert {path.stem for path in paths.DOCUMENTS.glob("*.yaml")} - {"forum-scratch"} <= named


@pytest.mark.parametrize("text", ["a\nb", "a\tb", "  a", "x\x0by\x85z", "a`b``c", "`", "\ufffd"])
def test_what_a_model_writes_fits_a_tables_cell_as_code(text):
    cell = tables.as_code(text)
    assert len(cell.splitlines()) == 1
    fence = cell.split(" ")[0]
    assert set(fence) == {"`"}
    assert fence not in cell[len(fence) : -len(fence)]


def test_the_list_names_every_hub_id_with_its_size_and_every_stand_in_that_is_there():
    lines = listing.text().splitlines()
    for family in registry.families().values():
        for architecture in family.architectures:
            (line,) = (line for line in lines if architecture.hub_id in line)
            assert f"{architecture.parameters:,}" in line
    assert sum("ships with the book" in line for line in lines) == len(sources.families_with("stand-in"))


def test_a_stand_in_that_learnt_less_than_a_quarter_beyond_pairs_contradicts_the_page():
    poor = Found({"stand ins": lambda: rows.stand_ins().assign(model=9.0)}, {})
    assert check(measures.STATEMENTS["stand-ins-have-learnt"], poor).outcome == "fails"


def test_the_prompt_in_the_prose_is_the_runs_own(results):
    assert measures.PROMPT(results) == "` def f(x `"
