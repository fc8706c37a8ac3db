"""What the chapter on the thread about a model from scratch says in words: captions, and the numbers of its prose."""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvbook import fingerprint
from kvbook.analyses import scratch as tables
from kvbook.analyses import wording
from kvbook.analyses.wording import DTYPES, size
from kvbook.experiments import scratch_logits, scratch_speed
from kvbook.fits import Estimate
from kvbook.records import Run
from kvbook.scratch import checkpoints
from kvbook.scratch.ways import FIXES, POSTED, WINDOW, refill_name

_NATS = "{:+.3f}"


def as_code(text: str) -> str:
    """Write a piece of text for a table's cell, so that nothing in it is taken for markup."""
    return f"`` {text.replace('`', '’')} ``"


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
    repetitions = speed.rows["repetition"].nunique()
    timing = f"Median of {repetitions} paired repetitions with 95 % interval, {dtype}; {wording.machine(speed)}"
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
            f"change, without stale keys and values, and the whole remedies. {setting}.",
            "A list of estimates with intervals, a line a change.",
        ),
        "fig-scratch-speed": (
            f"{found['fig-scratch-speed']} Time of one step without a cache over that with it, by the text's length. Solid: "
            f"logits of all rows, as in both posts; dashed: of the last alone. {model}, and the reply's size with random "
            f"weights. {timing}.",
            "Ratios against length on logarithmic axes, two lines a model, and a dotted line at 3.",
        ),
        "fig-scratch-cost": (
            f"{found['fig-scratch-cost']} Loss past the first block against the time that it takes there, over the posted cache's. "
            f"{model}. Loss: {loss.rows['sample'].nunique()} texts of {wording.corpus(loss)}. {timing}.",
            "Points with error bars: time against loss; a line joins the refilled caches of different hops.",
        ),
        "tab-scratch-texts": (
            f"What each way writes behind the first block on the same random draws, from one character. {model}, {dtype}; "
            f"one text each; {wording.machine(texts)}.",
            "",
        ),
        "tab-claims-forum-scratch": (
            f"Claims of the thread and what this run says of them. {setting}. “In kind”: the mechanism is shown on weights "
            "that are not the thread's, so its magnitudes are not.",
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
    posted, reply, forgotten = (
        against(tables.gap_behind(loss, way)) for way in (POSTED, tables.REPLY, tables.FORGOTTEN)
    )
    costs = tables.cost_table(loss, speed).set_index("way")
    times = costs["time_ratio"].map(lambda e: e.text("{:.2f}"))
    said = {
        "fig-scratch-steps": _steps(logits, half),
        "fig-scratch-loss": f"In nats a character past the first block, the loss against the window's is {posted} with the posted "
        f"cache, {reply} with the reply's, and {forgotten} with a forgotten offset.",
        "fig-scratch-causes": _causes(loss),
        "fig-scratch-speed": _speedup(tables.speed_table(speed)),
        "fig-scratch-cost": f"Past the block a {half.replace(',', ' with')} takes {times[half]} times the posted cache's time, "
        f"and its loss against the window's, in nats a character, is {against(costs.loc[half, 'gap'])}; the window takes "
        f"{times[WINDOW]} times that time.",
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
        f"Past the first block, in {DTYPES[dtype]}, the posted cache {parts(POSTED)} the window that it should equal (by up to "
        f"{size(rows.loc[POSTED, 'max_abs'])}), and the refilled cache {parts(half)} its own window "
        f"(by up to {size(rows.loc[half, 'max_abs'])})."
    )


def _causes(loss: pd.DataFrame) -> str:
    gaps = {fix: tables.gap_behind(loss, fix, POSTED) for fix in FIXES}
    lower = [fix for fix in FIXES if gaps[fix].high < 0]
    changes = "none" if not lower else " and ".join(f"“{fix[2:]}” ({gaps[fix].text(_NATS)})" for fix in lower)
    share = tables.stale_share(loss)
    stale = "" if share is None else f"; without stale keys and values {share.text('{:.0%}')} of the gap is gone"
    return (
        "Past the block the posted cache's loss against the window's, in nats a character, is "
        f"{against(tables.gap_behind(loss, POSTED))}, and of the reply's four changes {changes} is seen to lower it{stale}."
    )


def _speedup(steps: pd.DataFrame) -> str:
    drawn = steps[steps["way"] == scratch_speed.ALL_ROWS]
    longest = drawn.loc[drawn.groupby("model", sort=False)["length"].idxmax()]
    names = {scratch_speed.TRAINED: "trained model", scratch_speed.REPLYS_MODEL: "the reply's size"}
    said = " and ".join(
        f"{row.ratio.text('{:.1f}')} times ({names[row.model]}, {row.length:,} characters)"
        for row in longest.itertuples()
    )
    return f"Without a cache, a step that computes all rows of logits takes {said} as long as with one."


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
        rows = logits.rows[logits.rows["comparison"] == fix]
        said[f"{key}_equal"] = f"{int((rows['max_abs'] == 0).sum())} of {len(rows)}"
        said[f"{key}_change"] = tables.gap_behind(loss.rows, fix, POSTED).text(_NATS)
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
    said |= _speeds(speed.rows)
    return said


def _speeds(speed: pd.DataFrame) -> dict[str, str]:
    steps = tables.speed_table(speed)
    said = {
        "run_ratio": tables.run_ratio(speed).text("{:.1f}"),
        "run_ratio_one_row": tables.run_ratio(speed, WINDOW).text("{:.1f}"),
        "run_tokens": str(scratch_speed.REPLYS_NEW_TOKENS),
    }
    for key, model in (("trained", scratch_speed.TRAINED), ("reply", scratch_speed.REPLYS_MODEL)):
        for suffix, way in (("", scratch_speed.ALL_ROWS), ("_one_row", WINDOW)):
            rows = steps[(steps["model"] == model) & (steps["way"] == way)]
            above = [r.length for r in rows.itertuples() if r.ratio.low > 3]
            said[f"above_three_{key}{suffix}"] = (
                f"from {min(above)} on"
                if above and min(above) < max(above)
                else f"at {above[0]}"
                if above
                else "nowhere"
            )
    ways = speed.loc[speed["measure"] == scratch_speed.PAST, "way"].unique()
    said["hops"] = ", ".join(way.rsplit(" ", 1)[1] for way in ways if way.startswith("refill"))
    return said
