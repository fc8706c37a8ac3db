"""One clear line for what went wrong: messages that new users stumbled over."""

import re

from refusing import refusal
from small_models import asked

from kvbook import paths
from kvbook.diagnosis import check, refusals, tokenizer_boundary
from kvbook.models import corpus, loading, sources


def test_a_corpus_without_one_text_that_is_long_enough_does_not_advise_no_samples(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    said = refusal(lambda: list(corpus.samples(str(tmp_path), loading.tokenizer("gpt2"), 1, 50)))
    assert said.endswith("asked for: lower n_tokens, or name longer texts")


def test_a_tokenizer_of_another_model_is_refused():
    config, text = sources.resolve("gpt2", "random").config, corpus.Sample(0, "a text", 0, [3, 60_000])
    assert "gives id 60,000, and its vocabulary has 50,257" in refusal(refusals.refuse_vocabulary, "", config, [text])


def test_a_prefix_that_ends_in_a_space_shows_the_token_that_the_space_becomes():
    lines, status = tokenizer_boundary.check("llama", "Once upon a ", "time")
    assert status == 1
    assert "ends with ''" not in "\n".join(lines)
    assert "alone the prefix ends with" in "\n".join(lines)


def test_an_adapter_is_told_from_a_model_and_the_remedy_is_said(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter_config.json cannot be read: save the adapter" in refusal(sources.resolve, str(tmp_path), "stand-in")


def test_outside_a_checkout_the_remedy_for_a_missing_stand_in_is_one_that_a_wheel_has(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "STANDINS", tmp_path)
    assert re.search("book's checkout, .* or name a folder or hub id", refusal(sources.resolve, "llama", "stand-in"))


def test_the_shape_of_a_document_is_drawn_without_the_hub():
    where = sources.resolve("meta-llama/Llama-3.1-8B-Instruct", "random")
    assert (where.source, where.config.num_hidden_layers, where.repository) == ("random", 32, None)


def test_on_apples_gpu_float64_is_run_on_the_processor_and_the_report_says_so(llama_folder, text_folder, monkeypatch):
    stock, asked_of = loading.load, []

    def load(*given, device, **named):
        asked_of.append((named["dtype"], device))
        return stock(*given, device="cpu", **named)

    monkeypatch.setattr(loading, "load", load)
    found = check.check(asked(llama_folder, text_folder, device="mps"))
    assert asked_of == [("float32", "mps"), ("float64", "cpu")]
    assert any(text.startswith("float64 on the device, which lacks it") for text in found.not_tried)
    assert [drift.dtype for drift in found.drift] == ["float64", "float32"]


def test_cost_without_a_model_says_that_one_is_missing(kvbook_here):
    done = kvbook_here("models", "cost")
    assert done.returncode == 2
    assert "Missing argument 'model'" in " ".join(done.stderr.split())
