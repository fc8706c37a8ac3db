"""The front page's experiment: questions answered twice, with a reused cache and without, by loop and by precision.

Written from recorded rows as plain HTML: radio buttons choose what is shown by the style sheet alone, so it is complete
without JavaScript, and without a style sheet everything stands one below the other.
"""

import functools
import html
import math
from collections import defaultdict
from collections.abc import Sequence

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


def markdown() -> str:
    """Write the experiment; nothing where no rows are recorded."""
    answers = recorded()
    if not answers:
        return ""
    panels = [_panel(loop, dtype, answers) for loop in LOOPS for dtype in answers]
    lines = [
        '<form class="kvbook-first-choice" aria-label="Choose how the cache is reused, and the precision">',
        _choice("loop", "What is cached", {name: loop[0] for name, loop in LOOPS.items()}),
        _choice("dtype", "Precision", {dtype: wording.DTYPES[dtype] for dtype in answers}),
        "</form>", '<div aria-live="polite">', *panels, "</div>", _gauge(), f"<p>{_made_on(answers)}</p>",
    ]
    return _framed(lines)


def fork() -> str:
    """Write the example's two answers in the coarsest dtype."""
    answers = recorded()
    return _framed([_panel(RIGHT, DTYPES[0], answers)]) if DTYPES[0] in answers else ""


def leads() -> str:
    """Draw how far the example's most probable token leads the next one, up to the first that differs."""
    answers = recorded()
    if DTYPES[0] not in answers:
        return ""
    rows = chosen(answers[DTYPES[0]][0], RIGHT)
    row = rows[rows["item"] == example(answers[DTYPES[0]][0])].iloc[0]
    place = int(row["first"])
    steps = list(zip(row["words_uncached"], row["margins_uncached"], strict=True))[: place + 1]
    steps.append((row["words"][place], row["margins"][place]))
    sides = [""] * place + [" without cache", " with cache"]
    widest = max(lead for _, lead in steps)
    bars = [
        f"<dt>{html.escape(word)}</dt><dd><i style=\"width: {70 * lead / widest:.1f}%\"></i>{lead:.3g}{side}</dd>"
        for (word, lead), side in zip(steps, sides, strict=True)
    ]
    return _framed(['<div class="kvbook-leads"><dl>', *bars, "</dl></div>"])


def finer() -> str:
    """Draw all answers of the right loop in each dtype, and the drift of both loops."""
    answers = recorded()
    strips = [_strip(chosen(rows, RIGHT), dtype) for dtype, (rows, _) in answers.items()]
    return _framed([*strips, _gauge(), f"<p>{_made_on(answers, '../')}</p>"]) if strips else ""


def _framed(lines: Sequence[str]) -> str:
    return "::::{raw} html\n" + "\n".join(['<div class="kvbook-first">', *lines, "</div>"]) + "\n::::"


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
            answers = found.of_runs(CHAPTER, {"reused_questions": run})["answers"]
            for dtype, of_dtype in answers.groupby("dtype"):
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


def _choice(name: str, legend: str, answers: dict[str, str]) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="kvbook-{name}" value="{value}"{" checked" if place == 0 else ""}> '
        f"{html.escape(words)}</label>"
        for place, (value, words) in enumerate(answers.items())
    )
    return f"<fieldset><legend>{legend}</legend>{buttons}</fieldset>"


def _panel(loop: str, dtype: str, answers: dict[str, tuple[pd.DataFrame, Run]]) -> str:
    rows = chosen(answers[dtype][0], loop)
    coarsest, _ = next(iter(answers.values()))
    asked = rows[rows["item"] == example(coarsest)]
    row = (asked if len(asked) else rows).iloc[0]
    return (
        f'<div class="kvbook-case" data-loop="{loop}" data-dtype="{dtype}">'
        f'<p class="kvbook-question">“{html.escape(row["item"])}”</p>'
        f"<dl><dt>without cache</dt><dd>{_text(row['words_uncached'], row['first'])}</dd>"
        f"<dt>with cache</dt><dd>{_text(row['words'], row['first'])}</dd></dl>"
        f"{_strip(rows, dtype)}</div>"
    )


def _text(words: Sequence[str], first: float) -> str:
    shown = [html.escape(_SHOWN.get(word, word.replace("\n", _SHOWN["\n"]))) for word in words]
    if first == math.inf:
        return "".join(shown)
    place = int(first)
    differing = shown[place] if place < len(shown) else "⟨end⟩"
    return f"{''.join(shown[:place])}<mark>{differing}</mark><span>{''.join(shown[place + 1 :])}</span>"


def _strip(rows: pd.DataFrame, dtype: str) -> str:
    """Draw a bar a question, as high as the share of tokens before the first that differs, and count what is kept."""
    kept = f"{int(rows['kept'].sum())} of {len(rows)}"
    said = f"{kept} answers to our questions keep all tokens in {wording.DTYPES[dtype]}"
    bars = []
    for place, (first, tokens) in enumerate(zip(rows["first"], rows["tokens_uncached"], strict=True)):
        look = "kept" if first == math.inf else "lost"
        # What differs from the first token on still has a foot to be seen.
        height = max(2, 20 * min(1.0, first / len(tokens)))
        bars.append(f'<rect class="{look}" x="{6 * place}" y="{20 - height:.3g}" width="5" height="{height:.3g}"/>')
    # Of one width for each bar, however many of 60 questions were asked.
    size = f"0 0 {6 * max(len(rows), 60) - 1} 20"
    strip = f'<svg class="kvbook-strip" viewBox="{size}" role="img" aria-label="{said}">{"".join(bars)}</svg>'
    return f"{strip}<p>{said}.</p>"


def _gauge() -> str:
    """Draw the drift of each loop in each dtype on one logarithmic axis."""
    of_all = found.printed("bug_or_rounding")["bug_or_rounding"]
    if of_all is None:
        return ""
    of_all = of_all[(of_all["document"] == drifts.REUSE) & (of_all["model"] == of_all["model"].iloc[0])]
    rows = []
    for loop, (words, *_, symptom, verdict, how) in LOOPS.items():
        medians = of_all[of_all["symptom"] == symptom].groupby("dtype")["drift"].median()
        there = [dtype for dtype in DTYPES if dtype in medians]
        dots = [f'<i data-dtype="{dtype}" style="left: {_place(medians[dtype]):.1f}%"></i>' for dtype in there]
        dots += [f'<span style="{where}">{words}</span>' for words, where in _labels(medians)]
        values = ", ".join(f"{wording.DTYPES[dtype]} {wording.power_of_ten(medians[dtype])}" for dtype in there)
        label = f"Drift with {words}: {values}"
        rows.append(
            f'<div class="kvbook-gauge" data-of="{loop}"><b>{verdict}:</b> the drift {how}'
            f'<div role="img" aria-label="{label}">{"".join(dots)}</div></div>'
        )
    ticks = [f'<span style="left: {_place(10.0**p):.1f}%">10<sup>{p}</sup></span>' for p in (-15, -10, -5, 0)]
    return f'{"".join(rows)}<div class="kvbook-axis" aria-hidden="true">{"".join(ticks)}</div>'


def _labels(medians: pd.Series) -> list[tuple[str, str]]:
    """Name the dots from left to right, those that lie on one another together, and say where the label stands."""
    found: list[tuple[str, float]] = []
    for dtype, drift in medians[medians.index.isin(DTYPES)].sort_values().items():
        words, place = wording.DTYPES[dtype], _place(drift)
        if found and place - found[-1][1] < NARROW:
            words = f"{found.pop()[0]}, {words}"
        found.append((words, place))
    # A long label at the right end would run off it.
    return [(words, "right: 0" if "," in words else f"left: {place:.1f}%; translate: -50%") for words, place in found]


def _place(drift: float) -> float:
    """Give where on the axis a drift stands, in per cent."""
    power = math.log10(drift) if drift > 0 else LOWEST
    return 100 * (min(max(power, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)


def _made_on(answers: dict[str, tuple[pd.DataFrame, Run]], top: str = "") -> str:
    """Name model, texts and processor, and lead to the chapter from a page that lies so far below the top."""
    runs: dict[str, list[str]] = defaultdict(list)
    for dtype, (_, run) in answers.items():
        runs[processors.label([run.about["machine"]])].append(wording.DTYPES[dtype])
    where = "; ".join(f"{', '.join(dtypes)} on the {processor}" for processor, dtypes in runs.items())
    model = next(iter(answers.values()))[1].about["models"][0]["name"]
    return (
        "One bar per question. Blue: all tokens are equal. Other heights: the share before the first difference. "
        f"{html.escape(model)}, greedy; {html.escape(where)}. "
        "Drift: difference of the logits over their spread, median over texts. "
        f'<a href="{top}chapters/07_prompt_reuse.html">The experiment</a>'
    )
