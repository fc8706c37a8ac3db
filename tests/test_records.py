import json

import pandas as pd
import pytest
import torch
from refusing import refusal

from kvbook.diagnosis import cores
from kvbook.runs import machine, records


def measure(units, called=lambda unit: None):
    def work(writer):
        for unit in units:
            if unit not in writer.done:
                called(unit)
                writer.append(unit, [{"unit": unit, "x": 0.1 * len(unit), "text": 'a "quoted", line\n'}] * 2)

    return work


def test_a_finished_run_is_read_and_not_done_again(data):
    first = records.run("e", {"settings": {"n": 1}}, measure(["u", "v"]), note={"commit": "abc"})
    second = records.run("e", {"settings": {"n": 1}}, lambda writer: pytest.fail("measured again"))
    assert second.rows.equals(first.rows)
    about = json.loads((first.folder / "run.json").read_text())
    assert (about["settings"], about["commit"]) == ({"n": 1}, "abc")
    assert {"started", "finished", "rows_sha256", "hash"} <= set(about)
    assert first.rows["text"].iloc[0] == 'a "quoted", line\n'
    assert first.about["rows"] == len(first.rows) == 4


@pytest.mark.filterwarnings("ignore:The 'future.infer_string' option")
def test_what_overflowed_is_read_as_a_number_and_a_word_of_any_length_as_a_word(data):
    both = [{"x": float("nan"), "token": "nan"}, {"x": 1.0, "token": "a" * 200_000}]

    def work(writer):
        # A unit may have no rows.
        writer.append("nothing", [])
        writer.append("u", both)

    run = records.run("e", {}, work)
    for own_dtype in (True, False):
        # Without a dtype for text, as before pandas 3.
        with pd.option_context("future.infer_string", own_dtype):
            rows = records.load(run.folder).rows
        assert (rows["x"].mean(), list(rows["token"])) == (1.0, ["nan", "a" * 200_000])


def test_a_processor_whose_instructions_are_limited_is_another_one(data, monkeypatch):
    whole = machine.describe("cpu")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    limited = machine.describe("cpu")
    assert limited["processor"] == f"{whole['processor']}, ONEDNN_MAX_CPU_ISA=AVX2"
    assert limited["device_name"].startswith(limited["processor"])
    made = [records.run("e", {"machine": each}, measure(["u"])) for each in (whole, limited)]
    assert made[0].hash != made[1].hash


@pytest.mark.parametrize(("library", "limit"), [("mkl", ""), ("open", ", OPENBLAS_CORETYPE=Haswell")])
def test_a_limit_of_openblas_makes_another_processor_only_where_torch_multiplies_with_it(monkeypatch, library, limit):
    monkeypatch.setattr(torch.__config__, "show", lambda: f"BLAS_INFO={library}, BUILD_TYPE=Release")
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    whole = machine.describe("cpu")["processor"]
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert machine.describe("cpu")["processor"] == f"{whole}{limit}"


XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 167
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 1
flags\t\t: fpu sse2 avx2 avx512f avx_vnni avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8

processor\t: 1
cpu family\t: 7
"""


def test_a_processor_is_described_by_what_the_system_says_of_it(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(XEON)
    monkeypatch.setattr(cores, "_CPUINFO", cpuinfo)
    about = machine.describe("cpu")
    assert about["processor"].startswith("Intel(R) Xeon(R) Processor")
    assert about["cpu"] == {
        "vendor": "GenuineIntel", "family": 6, "model": 167, "stepping": 1,
        "instructions": [
            "avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"
        ],
    }
    other = machine.identity(XEON.replace("167", "143").replace(" amx_bf16", ""))
    assert other["model"] == 143
    assert "amx_bf16" not in other["instructions"]


def test_what_a_system_does_not_say_of_its_processor_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "_CPUINFO", tmp_path / "no such file")
    assert machine.describe("cpu")["cpu"] == {
        "vendor": "unknown", "family": "unknown", "model": "unknown", "stepping": "unknown", "instructions": [],
    }
    arm = machine.identity("CPU implementer\t: 0x41\nCPU part\t: 0xd40\nFeatures\t: fp asimd sve bf16\n")
    assert (arm["vendor"], arm["model"], arm["instructions"]) == ("0x41", "0xd40", ["asimd", "bf16", "sve"])


@pytest.mark.parametrize("harm", [None, "", "{", '{"unit": "0"}\n', "\x00" * 80, "[1]\n"])
def test_a_failed_measurement_leaves_no_run_and_a_damaged_journal_costs_units_and_never_rows(data, harm):
    def fail(writer):
        measure("abcd")(writer)
        with next(data.rglob("rows.csv")).open("a") as file:
            file.write("e,half a ro")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        records.run("e", {"a": 1}, fail)
    assert [path.suffix for path in (data / "runs" / "e").iterdir() if path.is_dir()] == [".partial"]
    (journal,) = data.rglob("journal.jsonl")
    if harm is not None:
        journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]) + harm)
    calls = []
    run = records.run("e", {"a": 1}, measure("abcdef", calls.append))
    assert calls == list("ef" if harm is None else "cdef")
    assert run.rows["unit"].tolist() == list("aabbccddeeff")


@pytest.mark.parametrize(
    ("name", "harm"),
    [("rows.csv", "unit\n"), *(("run.json", harm) for harm in ("[]", "null", "{}", "\x00", '{"rows_sha256": 3}', ""))],
)
def test_a_changed_or_broken_file_is_one_line_with_what_to_do(data, name, harm):
    (records.run("e", {"a": 1}, measure("u")).folder / name).write_text(harm)
    said = refusal(records.run, "e", {"a": 1}, lambda writer: pytest.fail("measured again"))
    assert "delete the folder and run again" in said
