"""Processors: what pages call them, and verdicts, statements and numbers on each of them."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from made_up import MACHINE, run_of
from refusing import refusal

from kvbook import paths
from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.publishing import captions, documents, evaluated, measures, processors, verdicts
from kvreport.publishing.estimators import total
from kvreport.publishing.found import Found
from kvreport.publishing.measures import Measure, claim
from kvreport.publishing.rules import Bound, every, refuted, reproduced
from kvreport.site import environment, inserts, ledger

XEON, EPYC = "Intel(R) Xeon(R) Processor", "AMD EPYC"
AMX = {"vendor": "GenuineIntel", "family": 6, "model": 167, "stepping": 1, "instructions": ["avx512_bf16", "amx_bf16"]}
GENOA = {"vendor": "AuthenticAMD", "family": 25, "model": 17, "stepping": 1, "instructions": ["avx512_bf16"]}


def machine(processor: str, cpu: dict | None = None) -> dict:
    about = {"device": "cpu", "processor": processor, "device_name": f"{processor}, 2 threads", "threads": 2}
    return about | ({"cpu": cpu} if cpu else {})


# What they are called


NEWER, OLDER, SAPPHIRE = GENOA | {"model": 1}, GENOA | {"instructions": ["avx2"]}, AMX | {"model": 143}
UNKNOWN = dict.fromkeys(("vendor", "family", "model"), "unknown") | {"instructions": []}


@pytest.mark.parametrize(("machines", "label"), [
    ([machine(XEON, AMX)], "Intel Xeon (family 6 model 167, amx_bf16)"),
    ([machine(EPYC, GENOA)], "AMD EPYC (Zen 4, avx512_bf16)"),
    ([machine(f"{XEON}, ISA=AVX2", AMX)], "Intel Xeon (family 6 model 167, amx_bf16), ISA=AVX2"),
    # From notes.
    ([machine(EPYC)], "AMD EPYC (Zen 4, avx512_bf16)"),
    # Of both together no more is said than of each.
    ([machine(XEON), machine(XEON, AMX)], "Intel Xeon (family 6, amx_bf16)"),
    ([machine(EPYC, GENOA), machine(EPYC, NEWER)], "AMD EPYC (family 25, avx512_bf16)"),
    # A chip of that model would have other instructions.
    ([machine(EPYC, OLDER)], "AMD EPYC (family 25 model 17, avx2)"),
    ([machine(XEON, SAPPHIRE | {"instructions": ["avx512f"]})], "Intel Xeon (family 6 model 143, avx512f)"),
    # Nothing is known.
    ([machine("arm64", UNKNOWN)], "arm64"),
])
def test_a_processor_is_called_by_its_name_kind_and_most_telling_instructions(machines, label):
    assert processors.label(machines) == label


def test_a_device_says_what_is_known_from_notes_alone():
    assert processors.device(machine(EPYC)) == "AMD EPYC (Zen 4, avx512_bf16, from notes), 2 threads"
    # Controls: what was recorded, what is not known, and a GPU.
    assert processors.device(machine(EPYC, GENOA)) == "AMD EPYC (Zen 4, avx512_bf16), 2 threads"
    assert processors.device(machine("arm64")) == "arm64, 2 threads"
    assert processors.device(machine(XEON, AMX) | {"device": "cuda", "device_name": "Some GPU"}) == "Some GPU"


def run(processor: str, cpu: dict | None = None, seed: int = 0) -> Run:
    about = {"settings": {"seed": seed}, "hash": str(seed), "machine": MACHINE | machine(processor, cpu)}
    return run_of(pd.DataFrame({"value": [seed]}), **about)


def test_seeds_of_one_name_join_and_what_one_of_them_did_not_record_is_not_said_of_all():
    joined = evidence.joined([run(XEON, seed=1), run(XEON, AMX, seed=2)])
    assert list(joined.rows["value"]) == [1, 2]
    assert processors.label([joined.about["machine"]]) == "Intel Xeon (family 6, amx_bf16)"
    both = evidence.joined([run(XEON, AMX, seed=1), run(XEON, AMX | {"stepping": 2}, seed=2)])
    assert "model 167" in processors.label([both.about["machine"]])
    others = [run(EPYC, GENOA, seed=1), run(EPYC, GENOA | {"model": 1}, seed=2)]
    assert "differ in more than their seed" in refusal(evidence.joined, others)
    # What a run of before did not record of its processor, torch's instructions tell.
    older, newer = run(EPYC, seed=1), run(EPYC, GENOA, seed=2)
    older.about["machine"]["cpu_capability"], newer.about["machine"]["cpu_capability"] = "AVX512", "AVX2"
    assert "differ in more than their seed" in refusal(evidence.joined, [older, newer])


# Verdicts


SPEED = Measure("speed", rows="times", estimate=total("speed"))
HALF, TWICE = Bound(0.5, "arithmetic", "slower"), Bound(2, "arithmetic", "faster")
CHECK = claim(reproduced(every(SPEED, "above", TWICE)), refuted(every(SPEED, "below", HALF)), about_code=True)
CLAIM = {"id": "fast", "claim": "It is fast.", "quote": "fast", "place": "post 1", "published": ""}


def timed(speed: float | None) -> Found:
    return Found({}, {"times": None if speed is None else run_of(pd.DataFrame({"speed": [speed]}))})


def shown(monkeypatch, speeds: dict[str, float | None]) -> dict:
    monkeypatch.setattr(documents, "published", lambda name: {"claims": [CLAIM]})
    results = {name: timed(speed) for name, speed in speeds.items()}
    labels = {name: processors.label([machine(name)]) for name in results}
    return verdicts.Claims("a-post", {"fast": CHECK}).shown(results, labels).to_dict("records")[0]


def test_one_row_holds_the_verdicts_of_both_processors_and_once_what_they_agree_on(monkeypatch):
    row = shown(monkeypatch, {XEON: 3, EPYC: 0.1})
    assert row["verdict"] == "reproduced on the Intel Xeon; refuted on the AMD EPYC"
    assert row["here"] == (
        "On the Intel Xeon (family 6, amx_bf16): speed: 3.00. On the AMD EPYC (Zen 4, avx512_bf16): speed: 0.10."
    )
    assert row["n"] == "counted"
    # Control: they agree.
    row = shown(monkeypatch, {XEON: 3, EPYC: 4})
    assert row["verdict"] == "reproduced"
    assert row["here"].endswith("speed: 3.00. The same verdict on the AMD EPYC (Zen 4, avx512_bf16).")
    # Control: results of one machine, as of a reader's own run.
    assert shown(monkeypatch, {XEON: 3})["here"] == "speed: 3.00"


def test_a_processor_without_the_run_changes_no_verdict_and_the_row_says_so(monkeypatch):
    row = shown(monkeypatch, {XEON: 3, EPYC: None})
    assert row["verdict"] == "reproduced"
    assert row["here"].endswith("speed: 3.00. On the AMD EPYC (Zen 4, avx512_bf16): not recorded there.")
    assert shown(monkeypatch, {XEON: None, EPYC: 0.1})["verdict"] == "refuted"
    assert shown(monkeypatch, {XEON: None, EPYC: None})["verdict"] == "not run"


def test_the_ledger_counts_a_claim_once_and_lists_what_differs_by_processor():
    about = {"document": "a-post", "table": "tab-claims-a-post", "n": "4 runs"}
    words = ["reproduced", "reproduced on the Intel Xeon; refuted on the AMD EPYC"]
    rows = [about | {"claim": f"Claim {k}. “quoted” (post {k})", "verdict": word} for k, word in enumerate(words)]
    text = ledger.markdown(rows)
    assert text.startswith("Claims checked: 2; documents: 1; verdicts: 1 reproduced, 1 differs by processor.")
    assert "- Claim 1: **reproduced on the Intel Xeon; refuted on the AMD EPYC**." in text
    assert "\nreproduced,1\ndiffers by processor,1" in text
    # Control: where none differs there is no such row.
    assert "processor" not in ledger.markdown(rows[:1])


# Numbers


def test_a_slot_names_the_maker_whose_number_it_shows():
    numbers = {"speed": "3", "speed@AMD": "2"}
    assert captions.filled("{measured}`speed`, {measured}`speed@AMD`", numbers) == "3, 2"
    assert captions.filled("{measured}`speed@Other`", numbers) == "not recorded there"
    assert "`nosuch@AMD` is nowhere computed" in refusal(captions.filled, "{measured}`nosuch@AMD`", numbers)


def test_a_table_tells_what_runs_recorded_of_their_processor_from_what_notes_say(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RECORDED_RUNS", tmp_path)
    for name, about in {"old": machine(EPYC), "new": machine(EPYC, GENOA)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"machine": about}))
    monkeypatch.setattr(evidence, "manifest", lambda: {"a_chapter": {"published": ["old", "new"]}})
    kind = '"AMD EPYC (Zen 4, avx512_bf16)"'
    assert f"AMD EPYC,{kind},1 of 2,{kind}" in environment.recorded_processors()
    monkeypatch.setattr(evidence, "manifest", lambda: {"a_chapter": {"published": ["old"]}})
    assert f"AMD EPYC,,0 of 1,{kind}" in environment.recorded_processors()


# Headlines


def test_an_answer_names_the_models_texts_and_processors_behind_its_numbers_alone(monkeypatch):
    models = ["SmolLM2-135M-Instruct", "gpt2", "llama"]
    speed = {"models": models, "processor": "Maker One (kind)", "texts": "Python source"}
    size = {"models": [], "processor": "Maker Two", "texts": ""}
    book = {"numbers": {"speed": "3", "size": "4", "speed@AMD": "2"}, "behind": {"speed": [speed], "size": [size]}}
    monkeypatch.setattr(evaluated, "published", lambda name: book)
    one, two, there = (f"{{measured}}`x:{key}`" for key in ("speed", "size", "speed@AMD"))
    page = f"{two}\n\n1. **Fast?** {one} and {there}.\n   <!-- made on -->\n2. **Large?** {two}.\n   <!-- made on -->\n"
    assert inserts.fill(page, [], Path()) == (
        "4\n\n1. **Fast?** 3 and 2.\n"
        "   [SmolLM2-135M-Instruct and 2 other models on Python source, Maker One (kind)]{.kvbook-made-on}\n"
        "2. **Large?** 4.\n   [Maker Two]{.kvbook-made-on}\n"
    )


def test_every_headline_that_was_read_from_a_text_names_the_population_of_its_texts():
    front = (paths.ROOT / "pages" / "answers.md").read_text("utf-8")
    named = {}
    for chapter, key in {(role["chapter"], role["what"]) for role in measures.ROLE.finditer(front)}:
        for one in evaluated.published(chapter)["behind"][key]:
            named.setdefault(one["texts"], set()).add(chapter)
    # What draws no text is a time at a given length, and the atlas's tiny models on random ids.
    assert named.pop("") <= {"exact_caches", "static_cache", "atlas"}
    assert {"does_it_matter", "layer_drift", "from_scratch"} < named.pop("Python source")
    assert named == {"questions": {"prompt_reuse"}}


def test_every_answer_says_on_what_its_numbers_were_made():
    answers = (paths.ROOT / "pages" / "answers.md").read_text("utf-8").partition("\n```")[0]
    items = re.split(r"^\d+\. ", answers, flags=re.MULTILINE)[1:]
    assert len(items) == 8
    assert [item for item in items if not item.partition("\n\n")[0].rstrip().endswith("\n   <!-- made on -->")] == []
