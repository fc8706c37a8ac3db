"""What the chapter on the thread about a model from scratch says in words: captions, and the numbers of its prose."""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvbook import fingerprint
from kvbook.measuring.estimates import Estimate
from kvbook.runs.records import Run
from kvreport.chapters.from_scratch import logits as scratch_logits
from kvreport.chapters.from_scratch import speed as scratch_speed
from kvreport.chapters.from_scratch import tables
from kvreport.chapters.from_scratch.gpt import checkpoints
from kvreport.chapters.from_scratch.gpt.paths import FIXES, POSTED, WINDOW, refill_name
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, size

_NATS = "{:+.3f}"
# With fewer repetitions the bootstrap of a median reaches from the lowest to the highest: no interval of 95 %.
_FEWEST_REPETITIONS = 6
# The figure of costs is linear up to here on either side of 0.
LINEAR_NATS = 0.02
_, _, _, MODULO = FIXES


def as_code(text: str) -> str:
    """Write a piece of text for a table's cell, so that nothing in it is taken for markup."""
    return f"`` {text.replace('`', '’')} ``"


def bracket(speed: pd.DataFrame) -> str:
    """Name what stands in brackets behind a median of times."""
    count = speed["repetition"].nunique()
    return f"{'lowest to highest' if count < _FEWEST_REPETITIONS else '95 % interval'} of {count} paired repetitions"


def timing(speed: Run) -> str:
    """Say how times were taken, and where."""
    return f"median, and {bracket(speed.rows)}; {DTYPES[speed.rows['dtype'].iloc[0]]}; {wording.machine(speed)}"


def losses(loss: Run) -> str:
    """Say of what the losses past the first block are."""
    return (
        f"{loss.rows['sample'].nunique()} texts of {wording.corpus(loss)}, {tables.scored_behind(loss.rows):,} characters "
        f"scored past the first block, {DTYPES[loss.rows['dtype'].iloc[0]]}, intervals of 95 % (bootstrap over files)"
    )


def basis(logits: Run, loss: Run, texts: Run, speed: Run) -> str:
    """Say what verdicts rest on: weights, counts, dtypes and machines of each kind of rows."""
    model = f"{wording.models(loss)}, block {loss.about['models'][0]['shape']['block']}"
    machines = wording.listed(list(dict.fromkeys(wording.machine(run) for run in (loss, logits, texts))))
    steps = logits.rows[logits.rows["comparison"] == POSTED].groupby("dtype", sort=False).size()
    greedy = texts.rows[texts.rows["choice"] == "greedy"]
    return (
        f"{model}; {machines}. Losses: {losses(loss)}. Logits: one text, {_in_each(steps.astype(str).to_dict())}. "
        f"Greedy texts: {greedy['sample'].nunique()}, {DTYPES[greedy['dtype'].iloc[0]]}. Times: the reply's size with random "
        f"weights, {timing(speed)}."
    )


def _in_each(counts: Mapping[str, str]) -> str:
    """Write the steps of each dtype, once where they are as many in each."""
    dtypes = wording.listed([DTYPES[dtype] for dtype in counts])
    if len(counts) > 1 and len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} steps, each in {dtypes}"
    return wording.in_dtypes({dtype: f"{count} steps" for dtype, count in counts.items()})


def equal_steps(logits: pd.DataFrame, comparison: str) -> str:
    """Write in how many steps a comparison's logits are equal bit for bit."""
    rows = logits[logits["comparison"] == comparison].groupby("dtype", sort=False)["max_abs"]
    return _in_each({dtype: f"{int((values == 0).sum())} of {len(values)}" for dtype, values in rows})


def captions(logits: Run, loss: Run, texts: Run, speed: Run) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them.

    Parameters
    ----------
    logits, loss, texts, speed : Run
        The chapter's runs.

    Returns
    -------
    dict
        By name: ``name``, ``caption`` and, for a figure, ``alt``.
    """
    shape = loss.about["models"][0]["shape"]
    block = shape["block"]
    model = f"{wording.models(loss)}, block {block}"
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
    share = tables.stale_share(loss.rows)
    stale = "" if share is None else f" Without stale keys and values {share.text('{:.0%}')} of the gap is gone."
    found = findings(logits.rows, loss.rows, speed.rows)
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
            f"change, without stale keys and values, and the whole remedies.{stale} {model}; {losses(loss)}; "
            f"{wording.machine(loss)}.",
            "A list of estimates with intervals, a line a change.",
        ),
        "fig-scratch-speed": (
            f"{found['fig-scratch-speed']} Time of one step without a cache over that with it, by the text's length. Solid: "
            f"logits of all rows, as in both posts; dashed: of the last alone. {model}, and the reply's size with random "
            f"weights. Ratio: {timing(speed)}.",
            "Ratios against length on logarithmic axes, two lines a model, and a dotted line at 3.",
        ),
        "fig-scratch-cost": (
            f"{found['fig-scratch-cost']} Loss past the first block, less the uncached window's, against the time that it takes "
            f"there, over the posted cache's. The vertical axis is linear within ±{LINEAR_NATS} and logarithmic beyond; the "
            f"legend gives the losses. {model}. Loss: {losses(loss)}; {wording.machine(loss)}. Time: {timing(speed)}.",
            "Points with error bars: time against loss; a line joins the refilled caches of different hops.",
        ),
        "tab-scratch-texts": (
            f"What each way writes behind the first block on the same random draws, from one character. {model}, {dtype}; "
            f"one text each; {wording.machine(texts)}.",
            "",
        ),
        "tab-claims-forum-scratch": (
            f"Claims of the thread and what this run says of them. {basis(logits, loss, texts, speed)} “In kind”: the "
            "mechanism is shown on weights that are not the thread's, so its magnitudes are not.",
            "",
        ),
    }
    return wording.published(said)


def findings(logits: pd.DataFrame, loss: pd.DataFrame, speed: pd.DataFrame) -> dict[str, str]:
    """Say in one sentence what each figure shows, from the rows that it draws.

    Parameters
    ----------
    logits, loss, speed : DataFrame
        Rows of the experiments ``scratch_logits``, ``scratch_loss`` and ``scratch_speed``.

    Returns
    -------
    dict
        By the figure's name.
    """
    half = refill_name(max(1, int(loss["block"].iloc[0]) // 2))
    posted, reply = (against(tables.gap_behind(loss, way)) for way in (POSTED, tables.REPLY))
    costs = tables.cost_table(loss, speed).set_index("way")
    times = costs["time_ratio"].map(lambda e: e.text("{:.2f}"))
    said = {
        "fig-scratch-steps": _steps(logits, half),
        "fig-scratch-loss": f"Past the first block the loss, in nats against the window's, is {posted} with the posted cache, "
        f"{reply} with the reply's.",
        "fig-scratch-causes": _causes(loss),
        "fig-scratch-speed": _speedup(tables.speed_table(speed)),
        "fig-scratch-cost": f"Past the block a {half.replace(',', ' with')} takes {times[half]} times the posted cache's time; "
        f"its loss, against the window's, is {against(costs.loc[half, 'gap'])}.",
    }
    if wording.too_few(loss):
        unknown = "Texts of so few files cannot show what a way loses."
        said |= dict.fromkeys(("fig-scratch-loss", "fig-scratch-causes", "fig-scratch-cost"), unknown)
    return said


def against(gap: Estimate) -> str:
    """Say whether a loss is higher or lower than another, as far as the interval decides it."""
    if gap.low > 0:
        return f"{gap.text('{:.3f}')} higher"
    if gap.high < 0:
        return f"{Estimate(-gap.value, -gap.high, -gap.low).text('{:.3f}')} lower"
    return f"not seen to differ ({gap.text(_NATS)})"


def _steps(logits: pd.DataFrame, half: str) -> str:
    dtype = tables.finest(logits)
    if dtype is None:
        return "The dtypes of this run are too coarse to tell rounding from a bug."
    largest = tables.largest(logits)
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


def _causes(loss: pd.DataFrame) -> str:
    gaps = {fix: tables.gap_behind(loss, fix, POSTED) for fix in FIXES}
    lower = [fix for fix in FIXES if gaps[fix].high < 0]
    named = [f"“{fix[2:]}” ({_NATS.format(gaps[fix].value)})" for fix in lower]
    changes = f"{wording.listed(named) or 'none of four changes'} {'are' if len(named) > 1 else 'is'}"
    return (
        "Past the block the posted cache's loss, against the window's, is "
        f"{against(tables.gap_behind(loss, POSTED))} (nats); {changes} seen to lower it."
    )


def _speedup(steps: pd.DataFrame) -> str:
    drawn = steps[steps["way"] == scratch_speed.ALL_ROWS]
    longest = drawn.loc[drawn.groupby("model", sort=False)["length"].idxmax()]
    names = {scratch_speed.TRAINED: "trained model", scratch_speed.REPLYS_MODEL: "the reply's size"}
    said = " and ".join(
        f"{row.ratio.text('{:.1f}')} times ({names[row.model]}, {row.length:,} characters)"
        for row in longest.itertuples()
    )
    return f"Without a cache a step takes {said} as long."


def spread(logits: pd.DataFrame, comparison: str, where: str) -> str:
    """Write the largest difference of a comparison in each dtype.

    Parameters
    ----------
    logits : DataFrame
        Rows of the experiment ``scratch_logits``.
    comparison : str
        Value of its column of that name.
    where : str
        `analyses.scratch.INSIDE` or ``BEHIND``.
    """
    largest = tables.largest(logits).set_index(["comparison", "where"])
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


def numbers(logits: Run, loss: Run, held: Run, speed: Run) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    model = loss.about["models"][0]
    block = model["shape"]["block"]
    half = refill_name(max(1, block // 2))
    characters, held_out = training_of(model)
    said = {
        "block": str(block),
        "table": f"{model['shape']['table']:,}",
        "layers": str(model["layers"]),
        "width": str(model["shape"]["width"]),
        "trained_characters": characters,
        "held_out": held_out,
    }
    said["posted_inside"] = spread(logits.rows, POSTED, tables.INSIDE)
    said["posted_behind"] = spread(logits.rows, POSTED, tables.BEHIND)
    said["refill_behind"] = spread(logits.rows, half, tables.BEHIND)
    said["replys_own_behind"] = spread(logits.rows, scratch_logits.REPLYS_OWN, tables.BEHIND)
    said["shuffled_behind"] = spread(logits.rows, scratch_logits.SHUFFLED, tables.BEHIND)
    said["late_behind"] = spread(logits.rows, scratch_logits.LATE, tables.BEHIND)
    for key, fix in zip(("append", "mask", "prompt", "modulo"), FIXES, strict=True):
        said[f"{key}_equal"] = equal_steps(logits.rows, fix)
        said[f"{key}_change"] = tables.gap_behind(loss.rows, fix, POSTED).text(_NATS)
    closed = tables.closed_share(loss.rows, MODULO)
    said["modulo_share"] = "not to be told in this run" if closed is None else closed.text("{:z.1%}")
    longer = logits.rows[(logits.rows["comparison"] == scratch_logits.LAST_ONLY) & (logits.rows["length"] > 1)]
    said["prompt_apart"] = f"{longer['max_abs'].min():.2g} to {longer['max_abs'].max():.2g}"
    for key, how in zip(("chunks_reply", "chunks_shifted", "chunks_none"), scratch_logits.CHUNKS, strict=True):
        said[key] = spread(logits.rows, how, tables.INSIDE)
    for key, way in (("posted", POSTED), ("absolute", tables.ABSOLUTE)):
        said[f"{key}_gap"] = tables.gap_behind(loss.rows, way).text(_NATS)
    said["window_loss"] = tables.loss_behind(loss.rows, WINDOW).text("{:.2f}")
    share = tables.stale_share(loss.rows)
    said["stale_share"] = "not to be told in this run" if share is None else share.text("{:.0%}")
    said["held_gap"] = against(tables.held_gap(held.rows))
    said |= contexts(loss.rows, held.rows)
    said |= _speeds(speed.rows)
    return said


def contexts(loss: pd.DataFrame, held: pd.DataFrame) -> dict[str, str]:
    """Write what tells a short context from a stuck position, and which number of held characters predicts best.

    Parameters
    ----------
    loss, held : DataFrame
        Rows of the experiments ``scratch_loss`` and ``scratch_held``.

    Returns
    -------
    dict
        By glue key.
    """
    whole = refill_name(int(loss["block"].iloc[0]))
    best, gap = tables.best_held(held)
    return {
        "reply_gap": against(tables.gap_behind(loss, tables.REPLY)),
        "whole_refill_gap": against(tables.gap_behind(loss, whole)),
        # Both hold the same characters at every step, so they differ in positions alone.
        "stuck_gap": against(tables.gap_behind(loss, tables.REPLY, whole)),
        "best_held": str(best),
        "best_held_gap": against(gap),
    }


def _speeds(speed: pd.DataFrame) -> dict[str, str]:
    steps = tables.speed_table(speed)
    said = {
        "run_ratio": tables.run_ratio(speed).text("{:.1f}"),
        "run_ratio_one_row": tables.run_ratio(speed, WINDOW).text("{:.1f}"),
        "run_tokens": str(scratch_speed.REPLYS_NEW_TOKENS),
        "timed_bracket": bracket(speed),
    }
    for key, model in (("trained", scratch_speed.TRAINED), ("reply", scratch_speed.REPLYS_MODEL)):
        rows = steps[steps["model"] == model]
        every, one = (_above_three(rows[rows["way"] == way]) for way in (scratch_speed.ALL_ROWS, WINDOW))
        alike = f"{every}, with either"
        said[f"above_three_{key}"] = alike if every == one else f"{every} with all rows, {one} with a single row"
    ways = speed.loc[speed["measure"] == scratch_speed.PAST, "way"].unique()
    said["hops"] = ", ".join(way.rsplit(" ", 1)[1] for way in ways if way.startswith("refill"))
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
