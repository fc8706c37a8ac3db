"""`kvbook check`: which dtypes it runs, when it stops, what it says meanwhile, and what it refuses."""

import functools
import shutil
from contextlib import nullcontext
from unittest.mock import Mock

import gguf
import pytest
import small_gguf
import torch
import transformers
from refusing import refusal
from safetensors.torch import load_file, save_file
from small_models import asked, configure
from transformers import LlamaForCausalLM

from kvbook import UserError, progress
from kvbook.diagnosis import check, cores, faults, outcome, probe, refusals, wrong_pass
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.models import corpus, loading, lowbit, placement, sources


def end_in(change, monkeypatch) -> list[int]:
    """Let every pass of a Llama end in a change; return what notes the lengths that are fed."""
    fed, stock = [], LlamaForCausalLM.forward

    @functools.wraps(stock)
    def forward(self, input_ids=None, **options):
        fed.append(input_ids.shape[1])
        found = stock(self, input_ids, **options)
        change(found, input_ids)
        return found

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    return fed


@pytest.fixture
def checked(llama_folder, text_folder):
    """Return a function that checks the small Llama on two short texts, with some settings changed."""
    return lambda **changes: check.check(asked(llama_folder, text_folder, **changes))


# Which dtypes.


# A bug that its size gives away in fp32 needs no second dtype; a small one does, and those that are named are all run.
@pytest.mark.parametrize(("fault", "named", "dtypes", "status"), [
    (None, None, ["float64", "float32"], outcome.SOUND), (faults.offset_forgotten, None, ["float32"], outcome.BUG),
    (faults.kept_in_16_bits, None, ["float64", "float32"], outcome.BUG),
    (faults.offset_forgotten, "fp32,bf16", ["float32", "bfloat16"], outcome.BUG),
])
def test_dtypes_are_run_until_the_verdict_is_sure_and_the_rest_listed(checked, injected, fault, named, dtypes, status):
    injected(fault or nullcontext)
    found = checked(dtypes=named)
    assert [drift.dtype for drift in found.drift] == dtypes
    assert (found.status, found.first_suspicious_layer) == (status, 1 if fault else None)
    assert found.not_tried[:-1] == [dtype for dtype in UNIT_ROUNDOFF if dtype not in dtypes]
    assert found.not_tried[-1].endswith("--thorough")


@pytest.mark.parametrize(("module", "function", "error"), [
    (placement, "dtype_on", UserError("device 'mps' has no float64 arithmetic: leave float64 out of the dtypes")),
    # What lacks kernels alone is known only when they are called.
    (check, "rows_of", RuntimeError("expected Float")),
])
def test_where_fp64_is_missing_16_bits_stand_in_and_alone_it_is_refused(checked, monkeypatch, module, function, error):
    stock, words = getattr(module, function), str(error).split(" arithmetic")[0]

    def lacking(*arguments, **options):
        if "float64" in arguments:
            raise error
        return stock(*arguments, **options)

    monkeypatch.setattr(module, function, lacking)
    found = checked()
    assert [drift.dtype for drift in found.drift] == ["float32", "bfloat16"]
    assert (found.status, list(found.left_out)) == (outcome.SOUND, ["float64"])
    assert any("float64   left out: " in line and words in line for line in found.lines)
    assert words in refusal(checked, dtypes="float64")


def test_on_apples_gpu_float64_is_run_on_the_processor_and_the_report_says_so(checked, monkeypatch):
    stock, asked_of = loading.load, []

    def load(*given, device, **named):
        asked_of.append((named["dtype"], device))
        return stock(*given, device="cpu", **named)

    monkeypatch.setattr(loading, "load", load)
    found = checked(device="mps")
    assert asked_of == [("float32", "mps"), ("float64", "cpu")]
    assert any(text.startswith("float64 on the device, which lacks it") for text in found.not_tried)
    assert [drift.dtype for drift in found.drift] == ["float64", "float32"]


def test_texts_of_one_length_are_fed_together_and_others_apart():
    texts = [corpus.Sample(index, "file", 0, [5] * length) for index, length in enumerate([9, 7, 9, 9, 7, 9])]
    assert [[text.index for text in batch] for batch in probe.in_batches(texts, 3)] == [[0, 2, 3], [5], [1, 4]]


def test_a_bug_in_one_text_of_a_batch_is_that_texts_alone(llama, monkeypatch):
    texts = [corpus.Sample(index, "file", 0, list(range(11 + index, 31 + index))) for index in range(3)]
    clean, apart = (list(probe.rows_of(llama, "float32", texts, together=n)) for n in (3, 1))
    assert {(row["sample"], row["way"]) for row in clean} == {(row["sample"], row["way"]) for row in apart}
    assert all(row["drift"] < 1e-4 for row in clean)

    def wrong_on_a_cache(found, ids):
        if found.past_key_values is not None and found.past_key_values.get_seq_length() > ids.shape[1]:
            found.logits[1] += torch.linspace(0, 1, found.logits.shape[-1])

    end_in(wrong_on_a_cache, monkeypatch)
    assert {row["sample"] for row in probe.rows_of(llama, "float32", texts, together=3) if row["drift"] > 0.01} == {1}


# Threads.

CPUINFO = "".join(f"processor : {n}\nphysical id : {n // 4}\ncore id : {n % 4 // 2}\n\n" for n in range(8))


def test_two_threads_of_a_core_count_once_a_container_has_its_share_and_busy_cores_are_left():
    assert [cores.physical(CPUINFO, logical) for logical in (8, 2)] == [4, 1]
    assert [cores.physical(unknown, 6) for unknown in ("", "processor : 0\n")] == [6, 6]
    assert [cores.idle(4, load) for load in (0.2, 1.1, 3.9, 40)] == [4, 3, 1, 1]


def test_threads_are_chosen_before_torch_begins_and_never_against_the_user(monkeypatch):
    monkeypatch.setattr(cores, "_load", lambda: 1000.0)
    environment = {}
    cores.settle(environment)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert (environment["OMP_WAIT_POLICY"], environment["GOMP_SPINCOUNT"]) == ("PASSIVE", "10000")
    own = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    cores.settle(own)
    assert own == {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}


# What is said meanwhile.


def test_the_time_left_follows_from_the_share_that_is_done():
    work = progress.TimeLeft(200, "check")
    assert work.line(5) == "check"
    work.advance(50)
    assert work.line(5) == "check: 25%, about 15 s left"
    work.advance(1000)
    assert work.line(5) == "check: 100%, about 0 s left"


def test_all_of_the_work_is_counted_and_no_more(checked, monkeypatch):
    made, stock = [], progress.TimeLeft
    monkeypatch.setattr(progress, "TimeLeft", lambda *given: made.append(stock(*given)) or made[-1])
    checked()
    assert made[0].done == pytest.approx(made[0].total, rel=0.05)


def test_time_and_memory_of_a_large_model_are_said_before_it_is_loaded(checked, monkeypatch, capsys):
    monkeypatch.setattr(loading, "load", Mock(side_effect=UserError("not loaded")))
    # Control: not of a small one.
    for large, words in ((1000, "kvbook: small-llama in float32, float64 takes about "), (1e9, "")):
        monkeypatch.setattr(check.layerwise, "LARGE", large)
        assert refusal(checked) == "not loaded"
        assert capsys.readouterr().err[: len(words) or None] == words


# Bad input: one line, exit status 2, nothing left behind.


def not_a_number(folder):
    state = load_file(folder / "model.safetensors")
    state["model.layers.2.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("change", "words"), [
    # A configuration tells, whatever weights lie beside it: an encoder of text, and one of speech with its decoder.
    (transformers.BertConfig().save_pretrained, "is a masked model"),
    (transformers.WhisperConfig().save_pretrained, "is an encoder-decoder whose source is no text"),
    # Of a library that is not here.
    (lambda folder: configure(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
     "cannot be loaded: Loading a GPTQ quantized model requires"),
    (not_a_number, "the weights hold NaN or infinity (model.layers.2.mlp.up_proj.weight, 1 in all)"),
])
def test_a_folder_without_a_model_to_check_is_refused(refused, llama_folder, text_folder, tmp_path, change, words):
    shutil.copytree(llama_folder, tmp_path / "model")
    change(tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    assert words in refused("check", tmp_path / "model", "--corpus", text_folder, "--samples", 2, "--tokens", 12)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_fewer_bits_are_dequantized_and_a_bug_still_shows(llama_folder, text_folder, tmp_path, bits, injected):
    options = {"dtype": torch.bfloat16} | lowbit.options(bits, torch.bfloat16)
    transformers.AutoModelForCausalLM.from_pretrained(llama_folder, **options).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(llama_folder).save_pretrained(tmp_path)
    found = check.check(asked(tmp_path, text_folder))
    assert found.verdict == "rounding"
    assert found.drift[0].dtype == "float64"
    assert found.drift[0].mean < 1e-12
    assert any("they were dequantized" in text for text in found.not_tried)
    plain, packed = (loading.load(str(folder), dtype="float32").model for folder in (llama_folder, tmp_path))
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (plain, packed)]
    # On a processor with AVX-512, bitsandbytes 0.50 unpacks rows shorter than its blocks of 64 with others' scales.
    assert 0 < (weights[0] - weights[1]).norm() / weights[0].norm() < 0.5
    injected(faults.one_step_late)
    assert check.check(asked(tmp_path, text_folder)).verdict == "bug"


@pytest.mark.parametrize(("number", "said"), [(99, "99 is not a valid"), (9, "Q8_1")])
def test_a_gguf_of_an_unsupported_type_is_refused(refused, llama, bpe, tmp_path, number, said):
    file = small_gguf.write(tmp_path / "small.gguf", llama, bpe)
    *_, kind, _offset = gguf.GGUFReader(file, "r+").tensors[0].field.parts
    assert kind[0] == gguf.GGMLQuantizationType.F32
    kind[0] = number
    refusal = refused("check", file)
    assert "holds numbers of a type that cannot be read" in refusal
    assert said in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_a_tokenizer_of_another_model_is_refused():
    config, text = sources.resolve("gpt2", "random").config, corpus.Sample(0, "a text", 0, [3, 60_000])
    assert "gives id 60,000, and its vocabulary has 50,257" in refusal(refusals.refuse_vocabulary, "", config, [text])


def test_a_forward_that_ignores_the_cache_is_a_bug_with_its_cause(checked, monkeypatch):
    stock = LlamaForCausalLM.forward

    def forward(self, input_ids=None, past_key_values=None, **options):
        return stock(self, input_ids, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    found = checked()
    assert found.status == outcome.BUG
    assert "the cache held 1 tokens where 11 had been fed" in found.cause
    assert "past_key_values" in found.remedy


def knows_the_last_token(found, ids):
    found.logits += (ids[:, -1:, None] * torch.arange(found.logits.shape[-1])).to(found.logits.dtype).cos()
    found.logits *= ids.shape[1]


def random(found, _ids):
    found.logits = torch.nn.functional.dropout(found.logits, 0.1, training=True)


def test_where_each_pass_reads_all_weights_one_shorter_length_tells_whether_a_full_pass_is_causal(llama, monkeypatch):
    ids = torch.arange(3, 15)[None]
    assert wrong_pass.reference_fault(llama, ids, every_length=False) is None
    fed = end_in(knows_the_last_token, monkeypatch)
    assert wrong_pass.reference_fault(llama, ids, every_length=False) == wrong_pass.NOT_CAUSAL
    assert fed == [12, 12, 6]


@pytest.mark.parametrize(("change", "words"), [
    (knows_the_last_token, "is not causal"),
    (random, "gives other logits each time that it is called: switch off what is random in it"),
])
def test_a_wrong_full_pass_is_no_fault_of_the_cache(refused, llama_folder, text_folder, monkeypatch, change, words):
    end_in(change, monkeypatch)
    assert words in refused("check", llama_folder, "--corpus", text_folder, "--samples", 2, "--tokens", 12)


def test_a_check_that_is_stopped_from_the_keyboard_says_so_and_is_no_bug(kvbook_here, llama_folder, monkeypatch):
    monkeypatch.setattr(probe, "cached_rows", Mock(side_effect=KeyboardInterrupt))
    done = kvbook_here("check", llama_folder)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvbook: stopped\n")


@pytest.mark.parametrize(("error", "words"), [
    (AssertionError("one token at a time"), "past_key_values (AssertionError: one token at a time)"),
    (AttributeError("no attribute 'past_key_values'", name="past_key_values"), "(its class returns none)"),
])
def test_what_a_models_code_raises_is_one_line(refused, llama_folder, monkeypatch, error, words):
    monkeypatch.setattr(LlamaForCausalLM, "forward", Mock(side_effect=error))
    assert words in refused("check", llama_folder)


def test_a_context_of_minus_one_is_none():
    assert transformers.XLNetConfig().max_position_embeddings == -1
    assert loading.context_length(transformers.XLNetConfig()) is None
