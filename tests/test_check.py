"""`kvbook check`: which dtypes it runs, when it stops, what it says meanwhile, and what it refuses."""

import json
import shutil
import subprocess
import sys

import pytest
import small_gguf
import torch
from safetensors.torch import load_file, save_file
from small_models import asked
from transformers import BertConfig, BertLMHeadModel, LlamaForCausalLM, ViTConfig, ViTModel

from kvbook import progress
from kvbook.diagnosis import check, cores, faults, outcome, probe
from kvbook.diagnosis.rows import in_batches, rows_of
from kvbook.errors import UserError
from kvbook.models import corpus, loading, placement, tokenizers


def lacking(monkeypatch, *names):
    stock = placement.dtype_on

    def dtype_on(name, device):
        if name in names:
            raise UserError(f"device 'mps' has no {name} arithmetic: leave {name} out of the dtypes")
        return stock(name, device)

    monkeypatch.setattr(placement, "dtype_on", dtype_on)


# Which dtypes.


def test_two_dtypes_decide_and_the_others_are_listed_as_not_tried(llama_folder, text_folder):
    found = check.check(asked(llama_folder, text_folder))
    assert [drift.dtype for drift in found.drift] == ["float64", "float32"]
    assert found.verdict == "rounding"
    assert found.not_tried[:2] == ["float16", "bfloat16"]
    assert found.not_tried[2].endswith("--thorough")


def test_a_bug_that_its_size_gives_away_is_not_looked_at_in_a_second_dtype(llama_folder, text_folder, planted):
    planted(faults.offset_forgotten)
    found = check.check(asked(llama_folder, text_folder))
    assert [drift.dtype for drift in found.drift] == ["float32"]
    assert (found.status, found.first_suspicious_layer) == (outcome.BUG, 1)


def test_control_a_small_bug_is_found_in_the_second_dtype(llama_folder, text_folder, planted):
    planted(faults.kept_in_16_bits)
    found = check.check(asked(llama_folder, text_folder))
    assert [drift.dtype for drift in found.drift] == ["float64", "float32"]
    assert (found.status, found.first_suspicious_layer) == (outcome.BUG, 1)


def test_where_fp64_is_missing_16_bits_stand_in_for_it(llama_folder, text_folder, monkeypatch):
    lacking(monkeypatch, "float64")
    found = check.check(asked(llama_folder, text_folder))
    assert [drift.dtype for drift in found.drift] == ["float32", "bfloat16"]
    assert found.status == outcome.SOUND
    assert list(found.left_out) == ["float64"]


def test_dtypes_that_are_named_are_all_run(llama_folder, text_folder, planted):
    planted(faults.offset_forgotten)
    found = check.check(asked(llama_folder, text_folder, dtypes="fp32,bf16"))
    assert [drift.dtype for drift in found.drift] == ["float32", "bfloat16"]


def test_texts_of_one_length_are_fed_together_and_others_apart():
    texts = [corpus.Sample(index, "file", 0, [5] * length) for index, length in enumerate([9, 7, 9, 9, 7, 9])]
    assert [[text.index for text in batch] for batch in in_batches(texts, 3)] == [[0, 2, 3], [5], [1, 4]]


def test_a_bug_in_one_text_of_a_batch_is_that_texts_alone(llama):
    texts = [corpus.Sample(index, "file", 0, list(range(11 + index, 31 + index))) for index in range(3)]
    clean = list(rows_of(llama, "float32", texts, together=3))
    apart = list(rows_of(llama, "float32", texts))
    assert {(row["sample"], row["way"]) for row in clean} == {(row["sample"], row["way"]) for row in apart}
    stock = llama.forward

    def forward(input_ids, past_key_values=None, **options):
        found = stock(input_ids, past_key_values=past_key_values, **options)
        if past_key_values is not None and past_key_values.get_seq_length() > input_ids.shape[1]:
            found.logits[1] += torch.linspace(0, 1, found.logits.shape[-1])
        return found

    llama.forward = forward
    try:
        rows = list(rows_of(llama, "float32", texts, together=3))
    finally:
        del llama.forward
    assert {row["sample"] for row in rows if row["drift"] > 0.01} == {1}
    assert all(row["drift"] < 1e-4 for row in clean)


# Threads.

CPUINFO = "".join(
    f"processor : {index}\nphysical id : {index // 4}\ncore id : {index % 4 // 2}\n\n" for index in range(8)
)


def test_two_threads_of_a_core_count_once_and_a_container_has_its_share():
    assert cores.physical(CPUINFO, 8) == 4
    assert cores.physical(CPUINFO, 2) == 1
    assert cores.physical("", 8) == 8
    assert cores.physical("processor : 0\n", 6) == 6


def test_busy_cores_are_left_to_those_who_use_them():
    assert [cores.idle(4, load) for load in (0.2, 1.1, 3.9, 40)] == [4, 3, 1, 1]


def test_threads_are_chosen_before_torch_begins_and_never_against_the_user(monkeypatch):
    monkeypatch.setattr(cores, "_load", lambda: 1000.0)
    environment = {}
    cores.settle(environment)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    own = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    cores.settle(own)
    assert (own["OMP_NUM_THREADS"], own["OMP_WAIT_POLICY"]) == ("7", "ACTIVE")


# What is said meanwhile.


def test_the_time_left_follows_from_the_share_that_is_done():
    work = progress.Work(200, "check")
    assert work.line(5) == "check"
    work.advance(50)
    assert work.line(5) == "check: 25%, about 15 s left"
    work.advance(1000)
    assert work.line(5) == "check: 100%, about 0 s left"


def test_all_of_the_work_is_counted_and_no_more(llama_folder, text_folder, monkeypatch):
    made = []
    stock = progress.Work
    monkeypatch.setattr(progress, "Work", lambda *given: made.append(stock(*given)) or made[-1])
    check.check(asked(llama_folder, text_folder))
    assert made[0].done == pytest.approx(made[0].total, rel=0.05)


def test_time_and_memory_of_a_large_model_are_said_before_it_is_loaded(llama_folder, text_folder, monkeypatch, capsys):
    monkeypatch.setattr(check, "_LARGE", 1000)

    said = []

    def load(*arguments, **options):
        said.append(capsys.readouterr().err)
        raise UserError("seen")

    monkeypatch.setattr(loading, "load", load)
    with pytest.raises(UserError, match="seen"):
        check.check(asked(llama_folder, text_folder))
    assert said[0].startswith("kvbook: small-llama in float32, float64 takes about ")
    # Control: not of a small one.
    monkeypatch.setattr(check, "_LARGE", 1e9)
    with pytest.raises(UserError, match="seen"):
        check.check(asked(llama_folder, text_folder))
    assert said[len(check.DTYPES)] == ""


# Bad input: one line, exit status 2, nothing left behind.


def refused(kvbook_here, folder, *arguments) -> str:
    before = sorted(folder.rglob("*")) if folder.is_dir() else []
    done = kvbook_here("check", folder, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("kvbook: ")
    assert (sorted(folder.rglob("*")) if folder.is_dir() else []) == before
    return done.stderr


def test_a_folder_without_a_tokenizer_is_refused(kvbook_here, llama_folder, tmp_path):
    for file in llama_folder.glob("*"):
        if "token" not in file.name:
            shutil.copy(file, tmp_path)
    assert "holds no tokenizer" in refused(kvbook_here, tmp_path)


def test_an_encoder_is_refused(kvbook_here, bpe, tmp_path):
    config = BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    BertLMHeadModel(config).save_pretrained(tmp_path)
    tokenizers.for_family(bpe, "llama", 64).save_pretrained(tmp_path)
    assert "is a masked model" in refused(kvbook_here, tmp_path)


def test_a_vision_model_is_refused(kvbook_here, tmp_path):
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32)
    ViTModel(config).save_pretrained(tmp_path)
    assert "type vit cannot be built as a causal" in refused(kvbook_here, tmp_path)


@pytest.mark.parametrize(("number", "said"), [(99, "99 is not a valid"), (9, "Q8_1")])
def test_a_gguf_of_an_unsupported_type_is_refused(kvbook_here, llama, bpe, tmp_path, number, said):
    file = small_gguf.write(tmp_path / "small.gguf", llama, bpe)
    name = b"blk.0.ffn_up.weight"
    content = bytearray(file.read_bytes())
    # Behind the name: the number of dimensions, each of them, and the type.
    place = content.index(name) + len(name) + 4 + 2 * 8
    assert content[place : place + 4] == (0).to_bytes(4, "little"), "fp32"
    content[place : place + 4] = number.to_bytes(4, "little")
    file.write_bytes(content)
    done = kvbook_here("check", file)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "holds numbers of a type that cannot be read" in done.stderr
    assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_remote_code_is_refused(kvbook_here, llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "my-own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('run')\n")
    assert "code that comes with a model is not run" in refused(kvbook_here, tmp_path)


def test_a_model_bigger_than_memory_is_refused(kvbook_here, llama_folder, monkeypatch):
    monkeypatch.setattr(placement, "free_bytes", lambda _device: 1000)
    assert "free: choose a smaller model" in refused(kvbook_here, llama_folder)


def test_weights_that_are_not_numbers_are_named(kvbook_here, llama_folder, text_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.2.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = refused(kvbook_here, tmp_path, "--corpus", text_folder, "--samples", 2, "--tokens", 12)
    assert "the weights hold NaN or infinity (model.layers.2.mlp.up_proj.weight, 1 in all)" in said


def test_a_forward_that_ignores_the_cache_is_a_bug_with_its_cause(llama_folder, text_folder, monkeypatch):
    stock = LlamaForCausalLM.forward

    def forward(self, input_ids=None, past_key_values=None, **options):
        return stock(self, input_ids, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    found = check.check(asked(llama_folder, text_folder))
    assert found.status == outcome.BUG
    assert "the cache held 1 tokens where 11 had been fed" in found.cause
    assert "past_key_values" in found.remedy


def test_a_full_pass_that_is_not_causal_is_no_fault_of_the_cache(kvbook_here, llama_folder, text_folder, monkeypatch):
    stock = LlamaForCausalLM.forward

    def forward(self, input_ids=None, **options):
        found = stock(self, input_ids, **options)
        # Every token is told the last one.
        found.logits += (input_ids[:, -1:, None] * torch.arange(found.logits.shape[-1])).to(found.logits.dtype).cos()
        found.logits *= input_ids.shape[1]
        return found

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    said = refused(kvbook_here, llama_folder, "--corpus", text_folder, "--samples", 2, "--tokens", 12)
    assert "is not causal" in said


def test_a_check_that_is_stopped_from_the_keyboard_says_so_and_is_no_bug(kvbook_here, llama_folder, monkeypatch):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "cached_rows", stopped)
    done = kvbook_here("check", llama_folder)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvbook: stopped\n")


def test_what_a_models_code_raises_is_one_line(kvbook_here, llama_folder, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "forward", raising(AssertionError("one token at a time")))
    assert "cannot be run with past_key_values (AssertionError: one token at a time)" in refused(
        kvbook_here, llama_folder
    )
    lacks = AttributeError("'Output' object has no attribute 'past_key_values'", name="past_key_values")
    monkeypatch.setattr(LlamaForCausalLM, "forward", raising(lacks))
    assert "(its class returns none)" in refused(kvbook_here, llama_folder)


def raising(error):
    def forward(*_arguments, **_options):
        raise error

    return forward


def test_a_full_pass_that_is_random_is_no_fault_of_the_cache(kvbook_here, llama_folder, text_folder, monkeypatch):
    stock = LlamaForCausalLM.forward

    def forward(self, *arguments, **options):
        found = stock(self, *arguments, **options)
        found.logits = torch.nn.functional.dropout(found.logits, 0.1, training=True)
        return found

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    said = refused(kvbook_here, llama_folder, "--corpus", text_folder, "--samples", 2, "--tokens", 12)
    assert "gives other logits each time that it is called: switch off what is random in it" in said


def test_a_context_of_minus_one_is_none(gpt2_folder):
    config = loading.config_of(str(gpt2_folder))
    assert loading.context_length(config) == 64
    config.n_positions = -1
    assert loading.context_length(config) is None


@pytest.mark.slow
def test_it_can_be_stopped_while_torch_is_imported(llama_folder):
    code = (
        "import os, signal, sys\n"
        # A shell's background job ignores it, and hands that on.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from kvbook.__main__ import main\n"
        f"sys.argv = ['kvbook', 'check', {str(llama_folder)!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvbook: stopped\n")
