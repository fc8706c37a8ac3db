"""What chapters would take on a card: by its peaks, and no model that does not fit."""

from dataclasses import replace

import pytest

from kvbook.models import registry
from kvbook.runs.work import Work
from kvreport.benchmarks import cards
from kvreport.site import inserts

SMALL = registry.families()["smollm2"].architectures[0]
CARD = cards.Card(16, 100, {"float64": 1, "float32": 10, "float16": 100, "bfloat16": 10}, "made up")


def test_a_step_takes_as_long_as_reading_the_weights_and_a_long_pass_as_its_arithmetic():
    faster = (CARD, replace(CARD, bandwidth_gb_s=200), replace(CARD, tflops={"float32": 20}))
    step = 4 * SMALL.parameters / 100e9
    assert [card.seconds(SMALL, "float32", 1) for card in faster] == pytest.approx([step, step / 2, step])
    long = CARD.seconds(SMALL, "float32", 4096)
    assert [card.seconds(SMALL, "float32", 4096) for card in faster] == pytest.approx([long, long, long / 2])
    # Attention counts: twice the tokens take more than twice as long.
    assert CARD.seconds(SMALL, "float32", 8192) > 2 * long


def test_dtypes_and_the_reference_add_up():
    work = Work(64, 10, 5, ("float32",))
    one = CARD.takes(SMALL, work)
    assert one < CARD.takes(SMALL, replace(work, dtypes=("float32", "float16")))
    assert CARD.takes(SMALL, replace(work, in_fp64=1)) == pytest.approx(one + CARD.seconds(SMALL, "float64", 64))


def test_what_a_card_does_not_hold_is_said_not_to_fit():
    # A pass of one token takes 4 bytes of each parameter at 100 GB/s: so many of them take a minute and a half.
    passes = Work(1, 90 * 100e9 / (4 * SMALL.parameters))
    assert CARD.minutes([SMALL], [passes], held_gb=17) == "does not fit"
    assert CARD.minutes([SMALL], [passes], held_gb=15) == "1.5"
    seven = registry.families()["llama"].architectures[0]
    assert cards.bytes_of(seven, Work(64, 1, dtypes=("float32",), copies=2)) == 8 * seven.parameters


def test_every_chapter_with_a_registered_model_has_its_row():
    text = inserts.PARTS["cards"](None)
    assert all(words in text for words in ("tab-cards", "06_layer_drift", "does not fit", "not measured"))
