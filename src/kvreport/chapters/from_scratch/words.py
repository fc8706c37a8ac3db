"""What the chapter on the thread about a model from scratch says in words: captions, and the numbers of its prose."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pandas as pd

from kvbook import fingerprint
from kvbook.measuring.estimates import FEWEST_UNITS, Estimate
from kvreport.chapters.from_scratch import logits, speed, tables
from kvreport.chapters.from_scratch.gpt import checkpoints
from kvreport.chapters.from_scratch.gpt.paths import FIXES, POSTED, WINDOW, refill_name
from kvreport.chapters.from_scratch.results import Results
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, size

_NATS = "{:+.3f}"
# The figure of costs is linear up to here on either side of 0.
LINEAR_NATS = 0.02
_, _, _, MODULO = FIXES


def as_code(text: str) -> str:
    """Write a piece of text for a table's cell, so that nothing in it is taken for markup."""
    return f"`` {text.replace('`', '’')} ``"


def bracket(results: Results) -> str:
    """Name what stands in brackets behind a median of times."""
    count = results.speed.rows["repetition"].nunique()
    return f"{'lowest to highest' if count < FEWEST_UNITS else '95 % interval'} of {count} paired repetitions"


def timing(results: Results) -> str:
    """Say how times were taken, and where."""
    dtype = DTYPES[results.speed.rows["dtype"].iloc[0]]
    return f"median, and {bracket(results)}; {dtype}; {wording.machine(results.speed)}"


def losses(results: Results) -> str:
    """Say of what the losses past the first block are."""
    loss = results.loss
    return (
        f"{loss.rows['sample'].nunique()} texts of {wording.corpus(loss)}, {results.scored_behind:,} characters "
        f"scored past the first block, {DTYPES[loss.rows['dtype'].iloc[0]]}, intervals of 95 % (bootstrap over files)"
    )


def named(results: Results) -> str:
    """Name the model and its block."""
    return f"{wording.models(results.loss)}, block {results.block}"


def basis(results: Results) -> str:
    """Say what verdicts rest on: weights, counts, dtypes and machines of each kind of rows."""
    runs = (results.loss, results.logits, results.texts)
    machines = wording.listed(list(dict.fromkeys(map(wording.machine, runs))))
    steps = results.equal.loc[POSTED]["steps"]
    greedy = results.texts.rows[results.texts.rows["choice"] == "greedy"]
    return (
        f"{named(results)}; {machines}. Losses: {losses(results)}. Logits: one text, {_in_each(steps.astype(str).to_dict())}. "
        f"Greedy texts: {greedy['sample'].nunique()}, {DTYPES[greedy['dtype'].iloc[0]]}. Times: the reply's size with random "
        f"weights, {timing(results)}."
    )


def _in_each(counts: Mapping[str, str]) -> str:
    """Write the steps of each dtype, once where they are as many in each."""
    dtypes = wording.listed([DTYPES[dtype] for dtype in counts])
    if len(counts) > 1 and len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} steps, each in {dtypes}"
    return wording.in_dtypes({dtype: f"{count} steps" for dtype, count in counts.items()})


def equal_steps(equal: pd.DataFrame, comparison: str) -> str:
    """Write in how many steps a comparison's logits are equal bit for bit, from `tables.equal_table`."""
    return _in_each({row.Index: f"{row.equal} of {row.steps}" for row in equal.loc[comparison].itertuples()})


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    loss, logits, model = results.loss, results.logits, named(results)
    dtype = DTYPES[loss.rows["dtype"].iloc[0]]
    scored = loss.rows.groupby("way")["n_scored"].sum().iloc[0]
    setting = (
        f"{model}, {dtype}; {loss.rows['sample'].nunique()} texts of {wording.corpus(loss)}, {scored:,} characters scored; "
        f"intervals of 95 % (bootstrap over files); {wording.machine(loss)}"
    )
    stepwise = (
        f"{model}, {' and '.join(DTYPES[d] for d in dict.fromkeys(logits.rows['dtype']))}; one text of "
        f"{wording.corpus(logits)}; {wording.machine(logits)}"
    )
    share = results.closed[tables.ABSOLUTE]
    stale = "" if share is None else f" Without stale keys and values {share.text('{:.0%}')} of the gap is gone."
    found = findings(results)
    said = {
        "fig-scratch-steps": (
            f"{found['fig-scratch-steps']} Largest difference of the logits at every step: posted cache, reply's cache and "
            "forgotten offset against the uncached window; the refilled cache against a window that moves by the same hop. "
            f"Dotted: end of the first block. {stepwise}.",
            "One panel a dtype, with a curve for each cached way over the steps, on a logarithmic axis; a dotted line where the "
            "first block ends.",
        ),
        "fig-scratch-loss": (
            f"{found['fig-scratch-loss']} Loss of each way by how many characters it has read (left), and what it loses against "
            f"the uncached window (right). Dotted: end of the first block. {setting}.",
            "Two panels of points with error bars over buckets of length, one colour and marker a way.",
        ),
        "fig-scratch-causes": (
            f"{found['fig-scratch-causes']} Loss past the first block less the uncached window's: the posted cache, with each "
            f"change, without stale keys and values, and the whole remedies.{stale} {model}; {losses(results)}; "
            f"{wording.machine(loss)}.",
            "A list of estimates with intervals, a line a change.",
        ),
        "fig-scratch-speed": (
            f"{found['fig-scratch-speed']} Time of one step without a cache over that with it, by the text's length. Solid: "
            f"logits of all rows, as in both posts; dashed: of the last alone. {model}, and the reply's size with random "
            f"weights. Ratio: {timing(results)}.",
            "Ratios against length on logarithmic axes, two lines a model, and a dotted line at 3.",
        ),
        "fig-scratch-cost": (
            f"{found['fig-scratch-cost']} Loss past the first block, less the uncached window's, against the time that it takes "
            f"there, over the posted cache's. The vertical axis is linear within ±{LINEAR_NATS} and logarithmic beyond; the "
            f"legend gives the losses. {model}. Loss: {losses(results)}; {wording.machine(loss)}. Time: {timing(results)}.",
            "Points with error bars: time against loss; a line joins the refilled caches of different hops.",
        ),
        "tab-scratch-texts": (
            f"What each way writes behind the first block on the same random draws, from one character. {model}, {dtype}; "
            f"one text each; {wording.machine(results.texts)}.",
            "",
        ),
        "tab-claims-forum-scratch": (
            "Claims of the thread, in our words and its own, the rule by which each is judged, and what this run says of them. "
            f"{basis(results)} {wording.VERDICTS}",
            "",
        ),
    }
    return wording.published(said)


def findings(results: Results) -> dict[str, str]:
    """Say in one sentence what each figure shows, from the table that it draws; by the figure's name."""
    half = results.half
    posted, reply = (against(results.gaps[way, WINDOW]) for way in (POSTED, tables.REPLY))
    costs = results.costs.set_index("way")
    times = costs["time_ratio"].map(lambda e: e.text("{:.2f}"))
    said = {
        "fig-scratch-steps": _steps(results),
        "fig-scratch-loss": f"Past the first block the loss, in nats against the window's, is {posted} with the posted cache, "
        f"{reply} with the reply's.",
        "fig-scratch-causes": _causes(results),
        "fig-scratch-speed": _speedup(results.speeds),
        "fig-scratch-cost": f"Past the block a {half.replace(',', ' with')} takes {times[half]} times the posted cache's time; "
        f"its loss, against the window's, is {against(costs.loc[half, 'gap'])}.",
    }
    if wording.too_few(results.loss.rows):
        unknown = "Texts of so few files cannot show what a way loses."
        said |= dict.fromkeys(("fig-scratch-loss", "fig-scratch-causes", "fig-scratch-cost"), unknown)
    return said


def against(gap: Estimate) -> str:
    """Say whether a loss is higher or lower than another, as far as the interval decides it."""
    if gap.low > 0:
        return f"{gap.text('{:.3f}')} higher"
    if gap.high < 0:
        return f"{Estimate(-gap.value, -gap.high, -gap.low, gap.kind).text('{:.3f}')} lower"
    return f"not seen to differ ({gap.text(_NATS)})"


def _steps(results: Results) -> str:
    dtype, half = results.finest, results.half
    if dtype is None:
        return "The dtypes of this run are too coarse to tell rounding from a bug."
    largest = results.largest
    rows = largest[(largest["where"] == tables.BEHIND) & (largest["dtype"] == dtype)].set_index("comparison")
    if rows.empty:
        return "No step of this run lies past the first block."

    def parts(comparison: str) -> str:
        rounding = tables.is_rounding(rows.loc[comparison, "relative_rms"], dtype)
        return "stays within rounding of" if rounding else "parts from"

    return (
        f"Past the block, in {DTYPES[dtype]}, the posted cache {parts(POSTED)} the window (by up to "
        f"{size(rows.loc[POSTED, 'max_abs'])}), the refilled cache {parts(half)} its own "
        f"(by up to {size(rows.loc[half, 'max_abs'])})."
    )


def _causes(results: Results) -> str:
    gaps = {fix: results.gaps[fix, POSTED] for fix in FIXES}
    lower = [fix for fix in FIXES if gaps[fix].high < 0]
    named = [f"“{fix[2:]}” ({_NATS.format(gaps[fix].value)})" for fix in lower]
    changes = f"{wording.listed(named) or 'none of four changes'} {'are' if len(named) > 1 else 'is'}"
    return (
        "Past the block the posted cache's loss, against the window's, is "
        f"{against(results.gaps[POSTED, WINDOW])} (nats); {changes} seen to lower it."
    )


def _speedup(steps: pd.DataFrame) -> str:
    drawn = steps[steps["way"] == speed.ALL_ROWS]
    longest = drawn.loc[drawn.groupby("model", sort=False)["length"].idxmax()]
    names = {speed.TRAINED: "trained model", speed.REPLYS_MODEL: "the reply's size"}
    said = " and ".join(
        f"{row.ratio.text('{:.1f}')} times ({names[row.model]}, {row.length:,} characters)"
        for row in longest.itertuples()
    )
    return f"Without a cache a step takes {said} as long."


def spread(results: Results, comparison: str, where: str) -> str:
    """Write the largest difference of a comparison in each dtype, `tables.INSIDE` or ``BEHIND``."""
    largest = results.largest.set_index(["comparison", "where"])
    if (comparison, where) not in largest.index:
        return "not measured in this run"
    rows = largest.loc[[(comparison, where)]]
    return "; ".join(f"{DTYPES[row.dtype]} {size(row.max_abs)}" for row in rows.itertuples())


def training_of(model: Mapping[str, Any]) -> tuple[str, str]:
    """Read what a shipped checkpoint's training recorded: number of characters, held-out loss."""
    ours = {f"scratch-{size}": checkpoints.shipped(size) for size in (checkpoints.SMALL, checkpoints.THREAD)}
    folder = ours.get(model["name"])
    # A model of that name that was trained on another text has other weights.
    if folder is None or model.get("sha256") != fingerprint.of_file(folder / "model.safetensors"):
        return "not recorded here", "not recorded here"
    about = json.loads((folder / "training.json").read_text("utf-8"))
    return f"{about['trained_characters']:,}", f"{about['held_out_nats_per_character']:.2f}"


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    model, gaps = results.model, results.gaps
    characters, held_out = training_of(model)
    said = {
        "block": str(results.block),
        "table": f"{model['shape']['table']:,}",
        "layers": str(model["layers"]),
        "width": str(model["shape"]["width"]),
        "trained_characters": characters,
        "held_out": held_out,
        "posted_inside": spread(results, POSTED, tables.INSIDE),
        "posted_behind": spread(results, POSTED, tables.BEHIND),
        "refill_behind": spread(results, results.half, tables.BEHIND),
        "replys_own_behind": spread(results, logits.REPLYS_OWN, tables.BEHIND),
        "shuffled_behind": spread(results, logits.SHUFFLED, tables.BEHIND),
        "late_behind": spread(results, logits.LATE, tables.BEHIND),
    }
    for key, fix in zip(("append", "mask", "prompt", "modulo"), FIXES, strict=True):
        said[f"{key}_equal"] = equal_steps(results.equal, fix)
        said[f"{key}_change"] = gaps[fix, POSTED].text(_NATS)
    closed, stale = results.closed[MODULO], results.closed[tables.ABSOLUTE]
    said["modulo_share"] = "not to be told in this run" if closed is None else closed.text("{:z.1%}")
    rows = results.logits.rows
    longer = rows[(rows["comparison"] == logits.LAST_ONLY) & (rows["length"] > 1)]
    said["prompt_apart"] = f"{longer['max_abs'].min():.2g} to {longer['max_abs'].max():.2g}"
    for key, how in zip(("chunks_reply", "chunks_shifted", "chunks_none"), logits.CHUNKS, strict=True):
        said[key] = spread(results, how, tables.INSIDE)
    for key, way in (("posted", POSTED), ("absolute", tables.ABSOLUTE)):
        said[f"{key}_gap"] = gaps[way, WINDOW].text(_NATS)
    said["window_loss"] = results.window_loss.text("{:.2f}")
    said["stale_share"] = "not to be told in this run" if stale is None else stale.text("{:.0%}")
    said["held_gap"] = against(results.held_gap)
    return said | contexts(results) | _speeds(results)


def contexts(results: Results) -> dict[str, str]:
    """Write what tells a short context from a stuck position, and which number of held characters predicts best."""
    whole = refill_name(results.block)
    best, gap = results.best_held
    return {
        "reply_gap": against(results.gaps[tables.REPLY, WINDOW]),
        "whole_refill_gap": against(results.gaps[whole, WINDOW]),
        # Both hold the same characters at every step, so they differ in positions alone.
        "stuck_gap": against(results.gaps[tables.REPLY, whole]),
        "best_held": str(best),
        "best_held_gap": against(gap),
    }


def _speeds(results: Results) -> dict[str, str]:
    steps = results.speeds
    said = {
        "run_ratio": results.run_ratios[speed.ALL_ROWS].text("{:.1f}"),
        "run_ratio_one_row": results.run_ratios[WINDOW].text("{:.1f}"),
        "run_tokens": str(speed.REPLYS_NEW_TOKENS),
        "timed_bracket": bracket(results),
    }
    for key, model in (("trained", speed.TRAINED), ("reply", speed.REPLYS_MODEL)):
        rows = steps[steps["model"] == model]
        every, one = (_above_three(rows[rows["way"] == way]) for way in (speed.ALL_ROWS, WINDOW))
        alike = f"{every}, with either"
        said[f"above_three_{key}"] = alike if every == one else f"{every} with all rows, {one} with a single row"
    said["hops"] = ", ".join(way.rsplit(" ", 1)[1] for way in results.costs["way"] if way.startswith("refill"))
    return said


def _above_three(rows: pd.DataFrame) -> str:
    """Say at which lengths a step's factor lies above 3 with all of its bracket."""
    lengths = sorted(rows["length"])
    above = sorted(row.length for row in rows.itertuples() if row.ratio.low > 3)
    if not above:
        return "never"
    if len(above) > 1 and above == lengths[-len(above) :]:
        return f"from a length of {above[0]} on"
    return f"at a length of {wording.listed([str(length) for length in above])}"


def size_finding(results: Results, recorded: Results) -> str:
    """Say in one sentence what the figure of this run's size and of the recorded one shows."""
    if wording.too_few(results.loss.rows) or wording.too_few(recorded.loss.rows):
        return "Texts of so few files cannot show what a way loses."
    here, there = (against(of.gaps[POSTED, WINDOW]) for of in (results, recorded))
    return f"The posted cache's loss past the block, against the window's, is {there} at the thread's size and {here} in this run."


def size_captions(results: Results, recorded: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of what sets this run beside the recorded ones of the thread's size."""
    here, there = (f"{named(of)}; {losses(of)}; {wording.machine(of.loss)}" for of in (results, recorded))
    hashes = ", ".join(f"`{run.hash}`" for run in recorded.runs)
    said = {
        "fig-scratch-sizes": (
            f"{size_finding(results, recorded)} Loss past the first block less the uncached window's in nats, under each change of "
            f"the posted cache. This run: {here}. Recorded, run `{recorded.loss.hash}`: {there}.",
            "A list of changes with two estimates and their intervals each, one a size of model.",
        ),
        "tab-scratch-sizes": (
            f"Claims of the thread on recorded runs at its own size, beside this run's verdicts. Recorded, runs {hashes}: "
            f"{basis(recorded)} {wording.VERDICTS}",
            "",
        ),
    }
    return wording.published(said)


def size_numbers(recorded: Results, verdicts: pd.DataFrame) -> dict[str, str]:
    """Write the numbers that the prose quotes of the recorded runs, by glue key; `verdicts` are `claims.beside`'s."""
    characters, held_out = training_of(recorded.model)
    costs = recorded.costs.set_index("way")
    share = recorded.closed[tables.ABSOLUTE]
    equal = int((verdicts["verdict there"] == verdicts["verdict of this run"]).sum())
    seconds = sum(
        (datetime.fromisoformat(run.about["finished"]) - datetime.fromisoformat(run.about["started"])).total_seconds()
        for run in recorded.runs
    )
    return {
        "thread_layers": str(recorded.model["layers"]),
        "thread_width": str(recorded.model["shape"]["width"]),
        "thread_block": str(recorded.block),
        "thread_characters": characters,
        "thread_held_out": held_out,
        "thread_minutes": f"{seconds / 60:.0f} minutes ({wording.machine(recorded.loss)})",
        "thread_posted_gap": against(recorded.gaps[POSTED, WINDOW]),
        "thread_modulo_change": recorded.gaps[MODULO, POSTED].text(_NATS),
        "thread_window_loss": recorded.window_loss.text("{:.2f}"),
        "thread_stale_share": "not to be told" if share is None else share.text("{:.0%}"),
        "thread_held_gap": against(recorded.held_gap),
        **{f"thread_{key}": said for key, said in contexts(recorded).items()},
        "thread_timed_bracket": bracket(recorded),
        "thread_refill_gap": against(costs.loc[recorded.half, "gap"]),
        "thread_refill_time": costs.loc[recorded.half, "time_ratio"].text("{:.2f}"),
        "thread_window_time": costs.loc[WINDOW, "time_ratio"].text("{:.1f}"),
        "thread_posted_inside": spread(recorded, POSTED, tables.INSIDE),
        "thread_posted_behind": spread(recorded, POSTED, tables.BEHIND),
        "same_verdicts": wording.of_all(equal, len(verdicts)),
    }
