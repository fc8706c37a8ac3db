"""The page on the models: what each writes, what the tables say, and where labels stand."""

import numpy as np
import pandas as pd
import pytest
import torch

from kvbook import paths
from kvbook.errors import UserError
from kvbook.models import listing, loading, packages, registry, sources
from kvreport.chapters.models import figures, greedy_samples, statements, tables
from kvreport.chapters.models.results import Results
from kvreport.chapters.models.settings import ModelsSettings
from kvreport.publishing.statements import check


@pytest.fixture(scope="module")
def settings(family_folders):
    # One that has learnt to write, and two whose vocabulary is mostly without text.
    names = f"gpt2, {family_folders['falcon']}, {family_folders['roberta']}"
    return ModelsSettings.checked(model=names, n_new_tokens=8, prompt="def f(x")


@pytest.fixture(scope="module")
def run(settings):
    return greedy_samples.EXPERIMENT.run(settings)


def scored(results: Results, scores: pd.DataFrame) -> Results:
    """Give the same with other scores of the stand-ins."""
    made = Results(results.greedy)
    made.__dict__.update(scores=scores, memory=results.memory)
    return made


@pytest.fixture(scope="module")
def results(run):
    return Results(run)


def test_every_model_writes_as_many_tokens_as_asked_for(run):
    assert run.rows.groupby("model").size().to_dict() == {"gpt2": 8, "falcon": 8, "roberta": 8}
    assert run.rows["probability"].between(0, 1).all()
    assert run.rows.groupby("model")["masked"].first().to_dict() == {"gpt2": 0, "falcon": 0, "roberta": 1}


def test_a_causal_model_writes_what_the_librarys_greedy_decoding_writes(run, family_folders):
    for family, name in {"gpt2": "gpt2", "falcon": str(family_folders["falcon"])}.items():
        loaded = loading.load(name)
        ids = loaded.tokenizer("def f(x", return_tensors="pt")["input_ids"]
        output = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=8, max_new_tokens=8
        )
        assert run.rows.loc[run.rows["model"] == family, "token"].tolist() == output[0, ids.shape[1] :].tolist()


def test_a_masked_model_is_read_at_a_mask_behind_the_text_and_nothing_stands_behind_the_mask(run, family_folders):
    loaded = loading.load(str(family_folders["roberta"]))
    ids = loaded.tokenizer("def f(x")["input_ids"]
    assert ids[-1] == loaded.tokenizer.eos_token_id
    masked = torch.tensor([[*ids[:-1], loaded.tokenizer.mask_token_id]])
    with torch.inference_mode():
        first = loaded.model(masked).logits[0, -1].argmax().item()
    assert run.rows.query("model == 'roberta' and step == 0")["token"].item() == first


def test_the_texts_pieces_make_the_text(run):
    tokenizer = loading.tokenizer("gpt2")
    written = run.rows.query("model == 'gpt2'")
    found = tables.samples(run.rows).set_index("model").loc["gpt2", "text"]
    assert found == tokenizer.decode(written["token"].tolist()) != ""


def test_all_stands_for_every_family_and_nothing_for_none():
    assert greedy_samples.names(ModelsSettings(weights="hub")) == list(registry.families())
    assert greedy_samples.names(ModelsSettings()) == sources.families_with("stand-in")
    assert greedy_samples.names(ModelsSettings.checked(model="gpt2, mpt,gpt2")) == ["gpt2", "mpt"]
    with pytest.raises(UserError, match="names no model"):
        greedy_samples.EXPERIMENT.run(ModelsSettings.checked(model=" , "))


def test_all_stand_ins_are_followed_by_the_trained_model_where_it_is_here(monkeypatch):
    def asked(**settings) -> list[str]:
        return greedy_samples.weights_of(ModelsSettings.checked(**settings), "smollm2")

    monkeypatch.setattr(packages, "is_here", lambda family: True)
    assert asked() == ["stand-in", "package"]
    assert asked(model="smollm2") == asked(model="smollm2, gpt2") == ["stand-in"]
    assert asked(weights="random") == ["random"]
    assert greedy_samples.weights_of(ModelsSettings(), "gpt2") == ["stand-in"]
    monkeypatch.setattr(packages, "is_here", lambda family: False)
    assert asked() == ["stand-in"]


def test_the_architectures_are_the_published_ones():
    table = tables.architectures().set_index("hub id")
    assert table.loc["tiiuae/falcon-7b", ["layers", "width", "heads", "KV heads"]].tolist() == [32, 4544, 71, 1]
    assert table.loc["meta-llama/Llama-3.1-8B-Instruct", "KV heads"] == 8
    assert table.loc["mosaicml/mpt-7b", "KV heads"] == 32
    assert table.loc["mosaicml/mpt-7b", "used by"] == "blog-past"
    named = {name for names in table["used by"] for name in names.split(", ")}
    assert {path.stem for path in paths.DOCUMENTS.glob("*.yaml")} - {"forum-scratch"} <= named


def test_fewer_bits_take_fewer_bytes_and_16_bits_take_half_of_32():
    memory = tables.memory()
    assert (memory["16-bit"] * 2 == memory["fp32"]).all()
    assert (memory["8-bit"] < memory["16-bit"]).all()
    assert (memory["4-bit"] < memory["8-bit"]).all()


def test_smoothing_keeps_a_constant_and_follows_a_fall_from_its_first_value():
    assert tables.smoothed(np.full(50, 3.0)) == pytest.approx(np.full(50, 3.0))
    falling = tables.smoothed(np.arange(100, 0, -1.0))
    assert falling[0] == 100
    # The mean of the last tenth: 10, 9, ..., 1.
    assert falling[-1] == pytest.approx(5.5)


def test_curves_start_at_the_logs_first_loss_in_bits_per_byte():
    name = sources.families_with("stand-in")[0]
    facts = loading.standin_facts(name)
    log = pd.read_csv(paths.STANDINS / name / "training_log.csv")
    first = tables.curves().query("name == @name").iloc[0]
    expected = log["loss_nats"][0] / np.log(2) * facts["held_out"]["tokens"] / facts["held_out"]["bytes"]
    assert first["bits_per_byte"] == pytest.approx(expected)
    assert first["tokens"] == facts["recipe"]["tokens_per_step"]


def test_labels_are_moved_apart_in_order_and_only_as_far_as_needed():
    places = np.array([1.0, 0.98, 3.0, 1.02])
    moved = figures.spread(places, 0.2)
    assert (np.argsort(moved) == np.argsort(places)).all()
    assert np.diff(np.sort(moved)).min() >= 0.2 - 1e-9
    assert moved[2] == 3.0
    assert moved[[0, 1, 3]].mean() == pytest.approx(1.0)
    assert np.diff(np.sort(places)).min() < 0.2, "the control: unmoved, they overlap"


@pytest.mark.parametrize("written", ["a\nb", "a\tb", "  a", "x\x0by\x85z", "a`b``c", "`", "\ufffd"])
def test_what_a_model_writes_fits_a_tables_cell_as_code(written):
    cell = tables.FORMATS["tab-models-samples"]["text"](written)
    assert len(cell.splitlines()) == 1
    fence = cell.split(" ")[0]
    assert set(fence) == {"`"}
    assert fence not in cell[len(fence) : -len(fence)]


def test_the_list_names_every_hub_id_and_every_stand_in_that_is_there():
    lines = listing.text().splitlines()
    for family in registry.families().values():
        for architecture in family.architectures:
            assert sum(architecture.hub_id in line for line in lines) == 1
    assert sum("ships with the book" in line for line in lines) == len(sources.families_with("stand-in"))


def test_a_stand_in_that_learnt_less_than_a_quarter_beyond_pairs_contradicts_the_page(results):
    statement = statements.STATEMENTS["stand-ins-have-learnt"]
    assert check(statement, results).outcome == "holds"
    for bits, outcome in ((0.5, "holds"), (9.0, "fails")):
        assert check(statement, scored(results, results.scores.assign(model=bits))).outcome == outcome


def test_numbers_come_from_the_records(results):
    said = {name: give(results) for name, give in statements.NUMBERS.items()}
    assert said["families"] == str(len(sources.families_with("stand-in")))
    assert said["prompt"] == "` def f(x `"
    assert all(said.values())
