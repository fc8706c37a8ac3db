"""What the chapter on the thread about a model from scratch says of the thread's own size, from recorded runs."""

from collections.abc import Mapping
from datetime import datetime

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.from_scratch import tables
from kvreport.chapters.from_scratch import words as scratch_text
from kvreport.chapters.from_scratch.gpt import checkpoints
from kvreport.chapters.from_scratch.gpt.paths import POSTED, WINDOW, refill_name
from kvreport.publishing import wording

MODEL = f"scratch-{checkpoints.THREAD}"
EXPERIMENTS = ("scratch_logits", "scratch_loss", "scratch_held", "scratch_texts", "scratch_speed")
THIS, RECORDED = "this run", "the thread's size, recorded"


def _texts(loss: Run) -> str:
    block = loss.about["models"][0]["shape"]["block"]
    return f"{wording.models(loss)}, block {block}; {scratch_text.losses(loss)}; {wording.machine(loss)}"


def finding(loss: pd.DataFrame, recorded: pd.DataFrame) -> str:
    """Say in one sentence what the figure of both sizes shows.

    Parameters
    ----------
    loss, recorded : DataFrame
        Rows of the experiment ``scratch_loss``, of this run and of the recorded one.
    """
    if wording.too_few(loss) or wording.too_few(recorded):
        return "Texts of so few files cannot show what a way loses."
    here, there = (scratch_text.against(tables.gap_behind(rows, POSTED)) for rows in (loss, recorded))
    return f"The posted cache's loss past the block, against the window's, is {there} at the thread's size and {here} in this run."


def captions(loss: Run, recorded: Mapping[str, Run]) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text, as `Page.figure` and `Page.table` take them.

    Parameters
    ----------
    loss : Run
        Of this run's experiment ``scratch_loss``.
    recorded : mapping of str to Run
        Recorded runs of `MODEL`, by experiment.
    """
    theirs, logits, texts, speed = (recorded[f"scratch_{name}"] for name in ("loss", "logits", "texts", "speed"))
    hashes = ", ".join(f"`{run.hash}`" for run in recorded.values())
    said = {
        "fig-scratch-sizes": (
            f"{finding(loss.rows, theirs.rows)} Loss past the first block less the uncached window's in nats, under each change of "
            f"the posted cache. This run: {_texts(loss)}. Recorded, run `{theirs.hash}`: {_texts(theirs)}.",
            "A list of changes with two estimates and their intervals each, one a size of model.",
        ),
        "tab-scratch-sizes": (
            f"Claims of the thread on recorded runs at its own size, beside this run's verdicts. Recorded, runs {hashes}: "
            f"{scratch_text.basis(logits, theirs, texts, speed)} “In kind”: the weights are not the "
            "thread's, and neither is the text.",
            "",
        ),
    }
    return wording.published(said)


def numbers(recorded: Mapping[str, Run], verdicts: pd.DataFrame) -> dict[str, str]:
    """Write the numbers that the prose quotes, by glue key.

    Parameters
    ----------
    recorded : mapping of str to Run
        Recorded runs of `MODEL`, by experiment.
    verdicts : DataFrame
        From `claims.forum_scratch.beside`.
    """
    loss, logits, speed = (recorded[f"scratch_{name}"] for name in ("loss", "logits", "speed"))
    model = loss.about["models"][0]
    block = model["shape"]["block"]
    half = refill_name(block // 2)
    characters, held_out = scratch_text.training_of(model)
    costs = tables.cost_table(loss.rows, speed.rows).set_index("way")
    share = tables.stale_share(loss.rows)
    equal = int((verdicts["verdict there"] == verdicts["verdict of this run"]).sum())
    seconds = sum(
        (datetime.fromisoformat(run.about["finished"]) - datetime.fromisoformat(run.about["started"])).total_seconds()
        for run in recorded.values()
    )
    held = recorded["scratch_held"].rows
    return {
        "thread_layers": str(model["layers"]),
        "thread_width": str(model["shape"]["width"]),
        "thread_block": str(block),
        "thread_characters": characters,
        "thread_held_out": held_out,
        "thread_minutes": f"{seconds / 60:.0f} minutes ({wording.machine(loss)})",
        "thread_posted_gap": scratch_text.against(tables.gap_behind(loss.rows, POSTED)),
        "thread_window_loss": tables.loss_behind(loss.rows, WINDOW).text("{:.2f}"),
        "thread_stale_share": "not to be told" if share is None else share.text("{:.0%}"),
        "thread_held_gap": scratch_text.against(tables.held_gap(held)),
        **{f"thread_{key}": said for key, said in scratch_text.contexts(loss.rows, held).items()},
        "thread_timed_bracket": scratch_text.bracket(speed.rows),
        "thread_refill_gap": scratch_text.against(costs.loc[half, "gap"]),
        "thread_refill_time": costs.loc[half, "time_ratio"].text("{:.2f}"),
        "thread_window_time": costs.loc[WINDOW, "time_ratio"].text("{:.1f}"),
        "thread_posted_inside": scratch_text.spread(logits.rows, POSTED, tables.INSIDE),
        "thread_posted_behind": scratch_text.spread(logits.rows, POSTED, tables.BEHIND),
        "same_verdicts": wording.of_all(equal, len(verdicts)),
    }
