"""The front page's experiment: what it shows of recorded answers."""

import math
import re

import pandas as pd
import pytest
from made_up import run_of

from kvbook import paths
from kvreport.chapters.prompt_reuse import rows as reuse
from kvreport.publishing import found
from kvreport.site import first_screen, inserts

UNCACHED = (1, 2, 3, 4)


def answers(cached: tuple[int, ...], question: str = "Why?") -> pd.DataFrame:
    """Make one model's answers to a question, with reuse and without; another one's, whose tokens are all 0, follow."""
    about = {"dtype": "bfloat16", "case": reuse.CHAT, "item": question, "cache": "dynamic"}
    about |= dict.fromkeys(("prefix_tokens", "shared_tokens", "prompt_tokens", "fed_tokens"), 1)
    ways = {reuse.NO_REUSE: UNCACHED, reuse.SHARED: cached}
    rows = [
        about | {"model": name, "way": way, "step": step, "token": token * of, "text": f"t{token}", "margin": token / 8}
        for name, of in (("a", 1), ("b", 0)) for way, tokens in ways.items() for step, token in enumerate(tokens)
    ]
    return found.of_runs("prompt_reuse", {"reused_questions": run_of(pd.DataFrame(rows))})["answers"]


@pytest.mark.parametrize(("cached", "first", "lead", "uncached"), [
    (UNCACHED, math.inf, None, None), ((1, 2, 9, 4), 2, 9 / 8, 3 / 8), ((9, 2, 3, 4), 0, 9 / 8, 1 / 8),
    ((1, 2, 3), 3, None, 4 / 8), ((1, 2, 3, 4, 5), 4, 5 / 8, None),
])
def test_answers_differ_first_where_tokens_do_or_one_ends_and_lead_there_on_each_side(cached, first, lead, uncached):
    row, other = answers(cached).itertuples()
    assert other.tokens == (0,) * len(cached)
    assert (row.first, row.kept, row.lead, row.lead_uncached) == (first, first == math.inf, lead, uncached)


def drawn(words: tuple[str, ...], first: float) -> str:
    return first_screen.DRAW.text(*first_screen.answer(words, first))


def test_a_text_marks_the_first_token_that_differs_and_nothing_where_all_are_equal():
    assert drawn(("a", " b", " c"), 1) == "a<mark> b</mark><span> c</span>"
    assert drawn(("a", " b"), 2) == "a b<mark>⟨end⟩</mark><span></span>"
    assert drawn(("a", " b"), math.inf) == "a b"


def test_what_a_model_wrote_is_never_markup():
    assert drawn(("<script>", "\n", "<|im_end|>"), math.inf) == "&lt;script&gt;↵ ⟨end⟩"


def test_the_example_is_the_first_question_whose_answers_share_some_tokens_and_then_differ(monkeypatch):
    monkeypatch.setattr(first_screen, "SHARED_TOKENS", range(2, 4))
    asked = [
        answers(UNCACHED, question="kept"), answers((9,), question="at once"), answers((1, 2, 9), question="later"),
        answers((1, 2, 3), question="later still"),
    ]
    assert first_screen.example(pd.concat(asked)) == "later"
    assert first_screen.example(pd.concat(asked[:2])) == "kept", "without one, the first of all"


def test_the_page_counts_the_answers_that_the_recorded_rows_keep_in_60_kilobytes_at_most():
    page = first_screen.markdown()
    assert len(page.encode()) < 60_000
    panels = dict(re.findall(r'data-loop="right" data-dtype="(\w+)">.*?<p>(\d+ of \d+) answers', page, re.DOTALL))
    assert {"bfloat16", "float32"} <= set(panels)
    for dtype, said in panels.items():
        _, run = first_screen.recorded()[dtype]
        rows = run.rows[(run.rows["dtype"] == dtype) & (run.rows["case"] == reuse.CHAT)]
        texts = rows.sort_values("step").groupby(["item", "way"])["token"].agg(tuple).unstack()
        assert said == f"{(texts[reuse.SHARED] == texts[reuse.NO_REUSE]).sum()} of {len(texts)}"
        assert page.count(f'data-loop="wrong" data-dtype="{dtype}"') == 1
    # Else a changed row would show nothing.
    assert len(set(panels.values())) > 1


STORY = (paths.ROOT / "pages/story.md").read_text("utf-8")


def test_the_story_has_900_words_at_most_and_four_figures():
    assert len(STORY.split()) <= 900
    assert re.findall(r"^<!-- part: (\w+)", STORY, re.MULTILINE) == ["fork", "leads", "finer", inserts.FIGURE]


def test_what_the_story_says_is_so_in_the_recorded_answers_and_its_leads_end_where_tokens_differ():
    recorded = {dtype: rows for dtype, (rows, _) in first_screen.recorded().items()}
    by_dtype = {dtype: first_screen.chosen(rows, first_screen.RIGHT) for dtype, rows in recorded.items()}
    in_bf16 = by_dtype["bfloat16"]
    (told,) = in_bf16[in_bf16["item"] == first_screen.example(recorded["bfloat16"])].itertuples()
    assert "Hamlet" in told.item
    assert " Bard" in told.words_uncached
    shown = re.findall(r"<dt>\s*(.*?)\s*</dt><dd><i.*?</i>(.+)</dd>", first_screen.leads())
    # A tie, and a hair ahead; they are the last two, and the first that differ.
    assert shown[-2:] == [("the", "0 without cache"), ("written", "0.125 with cache")]
    assert told.first == len(told.words) / 2
    kept = {dtype: rows["kept"].all() for dtype, rows in by_dtype.items()}
    assert kept == {"bfloat16": False, "float32": True, "float64": True}


def test_without_recorded_answers_there_is_no_experiment(monkeypatch):
    monkeypatch.setattr(first_screen.evidence, "manifest", dict)
    monkeypatch.setattr(first_screen, "recorded", first_screen.recorded.__wrapped__)
    assert first_screen.markdown() == first_screen.fork() == first_screen.leads() == first_screen.finer() == ""


def test_dots_that_lie_on_one_another_share_a_label():
    apart = pd.Series({"float64": 1e-15, "float32": 1e-6, "bfloat16": 1e-2})
    assert [words for words, _ in first_screen._labels(apart)] == ["fp64", "fp32", "bf16"]
    together = pd.Series({"float64": 0.5, "float32": 0.5, "bfloat16": 0.6})
    assert first_screen._labels(together) == [("fp64, fp32, bf16", "right: 0")]
