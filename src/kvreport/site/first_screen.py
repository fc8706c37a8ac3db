"""The front page's experiment: questions answered twice, with a reused cache and without, by loop and by precision.

Written from recorded rows as plain HTML: radio buttons choose what is shown by the style sheet alone, so it is complete
without JavaScript, and without a style sheet everything stands one below the other.  ``first_screen.html`` has the
markup.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.bug_or_rounding import rows as drifts
from kvreport.chapters.prompt_reuse import rows as reuse
from kvreport.publishing import found, processors, wording

CHAPTER = "prompt_reuse"
DTYPES = ("bfloat16", "float32", "float64")

# What a reader chooses, the rows of the answers, and the symptom whose drift the gauge shows.
RIGHT, WRONG = "right", "wrong"
LOOPS = {
    RIGHT: ("the right token ids", reuse.CHAT, reuse.SHARED, drifts.CUT, "Rounding", "shrinks with the precision"),
    WRONG: ("a prompt cut after a space", reuse.DOCUMENTED, reuse.AS_IS, drifts.ANEW, "A bug", "stays"),
}
# The example: the first question whose answers in the coarsest dtype share this many tokens, and then differ.
SHARED_TOKENS = range(6, 16)
# The gauge's axis, in powers of ten.
LOWEST, HIGHEST = -16, 1
# Dots that are nearer to each other, in per cent of the axis, share a label.
NARROW = 8
# Words for tokens that end an answer or a line.
_SHOWN = {"<|im_end|>": "⟨end⟩", "\n": "↵ "}
MARKUP = Path(__file__).with_suffix(".html")
DRAW = jinja2.Template(MARKUP.read_text("utf-8"), autoescape=True).module


def markdown() -> str:
    """Write the experiment; nothing where no rows are recorded."""
    answers = recorded()
    if not answers:
        return ""
    choices = [
        ("loop", "What is cached", {name: loop[0] for name, loop in LOOPS.items()}),
        ("dtype", "Precision", {dtype: wording.DTYPES[dtype] for dtype in answers}),
    ]
    cases = [_case(loop, dtype, answers) for loop in LOOPS for dtype in answers]
    return _framed(DRAW.experiment(choices, cases, _gauge(), _origin(answers)))


def fork() -> str:
    """Write the example's two answers in the coarsest dtype."""
    answers = recorded()
    return _framed(DRAW.case(**_case(RIGHT, DTYPES[0], answers))) if DTYPES[0] in answers else ""


def leads() -> str:
    """Draw how far the example's most probable token leads the next one, up to the first that differs."""
    answers = recorded()
    if DTYPES[0] not in answers:
        return ""
    rows = chosen(answers[DTYPES[0]][0], RIGHT)
    row = rows[rows["item"] == example(answers[DTYPES[0]][0])].iloc[0]
    place = int(row["first"])
    sides = [""] * place + [" without cache"]
    steps = list(zip(row["words_uncached"], row["margins_uncached"], sides, strict=False))
    return _framed(DRAW.leads([*steps, (row["words"][place], row["margins"][place], " with cache")]))


def finer() -> str:
    """Draw all answers of the right loop in each dtype, and the drift of both loops."""
    answers = recorded()
    strips = [DRAW.bars(**_strip(chosen(rows, RIGHT), dtype)) for dtype, (rows, _) in answers.items()]
    return _framed(*strips, DRAW.gauge(**_gauge()), DRAW.made_on(**_origin(answers, "../"))) if strips else ""


def _framed(*drawn: str) -> str:
    return "::::{raw} html\n" + "\n".join(['<div class="kvbook-first">', *drawn, "</div>"]) + "\n::::"


@functools.cache
def recorded() -> dict[str, tuple[pd.DataFrame, Run]]:
    """Read the answers by dtype, the coarsest first, each from the processor that asked most questions in it."""
    best: dict[str, tuple[pd.DataFrame, Run]] = {}
    # Runs in the finest dtype have a role of their own.
    for role in (evidence.PUBLISHED, "fp64"):
        if role not in evidence.manifest().get(CHAPTER, {}):
            continue
        by_processor: dict[str, list[Run]] = defaultdict(list)
        for run in evidence.cited(CHAPTER, role, reuse.EXPERIMENTS).get("reused_questions", []):
            by_processor[run.about["machine"]["processor"]].append(run)
        for runs in by_processor.values():
            run = evidence.joined(runs)
            for dtype, of_dtype in found.of_runs(CHAPTER, {"reused_questions": run})["answers"].groupby("dtype"):
                if dtype not in best or len(of_dtype) > len(best[dtype][0]):
                    best[dtype] = (of_dtype, run)
    return {dtype: best[dtype] for dtype in DTYPES if dtype in best}


def chosen(answers: pd.DataFrame, loop: str) -> pd.DataFrame:
    """Keep the answers of one way to reuse a cache, a row a question."""
    _, case, way, *_ = LOOPS[loop]
    return answers[(answers["case"] == case) & (answers["way"] == way)]


def example(answers: pd.DataFrame) -> str:
    """Choose the question that stands for all, by the rule of `SHARED_TOKENS`."""
    of_right = chosen(answers, RIGHT)
    fitting = of_right[of_right["first"].isin(SHARED_TOKENS)]
    return (fitting if len(fitting) else of_right)["item"].iloc[0]


def _case(loop: str, dtype: str, answers: dict[str, tuple[pd.DataFrame, Run]]) -> dict[str, Any]:
    rows = chosen(answers[dtype][0], loop)
    coarsest, _ = next(iter(answers.values()))
    asked = rows[rows["item"] == example(coarsest)]
    row = (asked if len(asked) else rows).iloc[0]
    uncached, cached = (answer(row[words], row["first"]) for words in ("words_uncached", "words"))
    about = {"question": row["item"], "uncached": uncached, "cached": cached, "strip": _strip(rows, dtype)}
    return {"loop": loop, "dtype": dtype} | about


def answer(words: Sequence[str], first: float) -> tuple[list[str], int | None]:
    """Return the words of an answer as they are shown, and the place of the first that differs, if one does."""
    shown = [_SHOWN.get(word, word.replace("\n", _SHOWN["\n"])) for word in words]
    return shown, None if first == math.inf else int(first)


def _strip(rows: pd.DataFrame, dtype: str) -> dict[str, Any]:
    """Count what is kept; a question's bar is as high as the share of tokens before the first that differs."""
    kept = f"{int(rows['kept'].sum())} of {len(rows)}"
    said = f"{kept} answers to our questions keep all tokens in {wording.DTYPES[dtype]}"
    looks = rows["first"].map(lambda place: "kept" if place == math.inf else "lost")
    # What differs from the first token on still has a foot to be seen.
    heights = (20 * rows["first"] / rows["tokens_uncached"].map(len)).clip(2, 20)
    return {"said": said, "heights": list(zip(looks, heights, strict=True))}


def _gauge() -> dict[str, Any]:
    """Place the drift of each loop in each dtype on one logarithmic axis."""
    of_all = found.printed("bug_or_rounding")["bug_or_rounding"]
    of_all = of_all[(of_all["document"] == drifts.REUSE) & (of_all["model"] == of_all["model"].iloc[0])]
    gauges = []
    for loop, (words, *_, symptom, verdict, how) in LOOPS.items():
        medians = of_all[of_all["symptom"] == symptom].groupby("dtype")["drift"].median().reindex(DTYPES).dropna()
        told = ", ".join(f"{wording.DTYPES[dtype]} {wording.power_of_ten(drift)}" for dtype, drift in medians.items())
        about = {"loop": loop, "words": words, "verdict": verdict, "how": how, "told": told}
        dots = [(dtype, _place(drift)) for dtype, drift in medians.items()]
        gauges.append(about | {"dots": dots, "labels": _labels(medians)})
    return {"drifts": gauges, "ticks": [(power, _place(10.0**power)) for power in (-15, -10, -5, 0)]}


def _labels(medians: pd.Series) -> list[tuple[str, str]]:
    """Name the dots from left to right, those that lie on one another together, and say where the label stands."""
    found: list[tuple[str, float]] = []
    for dtype, drift in medians.sort_values().items():
        words, place = wording.DTYPES[dtype], _place(drift)
        if found and place - found[-1][1] < NARROW:
            words = f"{found.pop()[0]}, {words}"
        found.append((words, place))
    # A long label at the right end would run off it.
    return [(words, "right: 0" if "," in words else f"left: {place:.1f}%; translate: -50%") for words, place in found]


def _place(drift: float) -> float:
    """Return the place of a drift on the axis, in per cent."""
    power = math.log10(drift) if drift > 0 else LOWEST
    return 100 * (min(max(power, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)


def _origin(answers: dict[str, tuple[pd.DataFrame, Run]], top: str = "") -> dict[str, str]:
    """Name model, texts and processor; the chapter lies below the page's folder, or below another `top`."""
    runs: dict[str, list[str]] = defaultdict(list)
    for dtype, (_, run) in answers.items():
        runs[processors.label([run.about["machine"]])].append(wording.DTYPES[dtype])
    where = "; ".join(f"{', '.join(dtypes)} on the {processor}" for processor, dtypes in runs.items())
    return {"model": next(iter(answers.values()))[1].about["models"][0]["name"], "where": where, "top": top}
