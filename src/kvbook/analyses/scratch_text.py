"""What the chapter on the thread about a model from scratch says in words: captions, and the numbers of its prose."""

import json

import pandas as pd

from kvbook.analyses import scratch as tables
from kvbook.analyses import wording
from kvbook.analyses.wording import DTYPES, power_of_ten
from kvbook.experiments import scratch_logits, scratch_speed
from kvbook.records import Run
from kvbook.scratch import checkpoints
from kvbook.scratch.ways import FIXES, POSTED, WINDOW, refill_name

_NATS = "{:+.3f}"


def _size(value: float) -> str:
    """Write a difference: a power of ten where it is small."""
    return power_of_ten(value) if value < 0.01 else f"{value:.2g}"


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
    said = {
        "fig-scratch-steps": (
            "Largest difference of the logits at every step: posted cache, reply's cache and forgotten offset against the "
            "uncached window; the refilled cache against a window that moves by the same hop. Dotted: end of the first "
            f"block. {stepwise}.",
            "One panel a dtype: up to one block the cached ways lie at rounding level; where the block ends the posted "
            "cache and the reply's leave it, and the refilled cache does not.",
        ),
        "fig-scratch-loss": (
            "Loss of each way by how many characters it has read (left), and what it loses against the uncached window "
            f"(right). Dotted: end of the first block. {setting}.",
            "Two panels of points with error bars over buckets of length, one colour and marker a way.",
        ),
        "fig-scratch-causes": (
            "Loss past the first block less the uncached window's: the posted cache, the same with each of the reply's four "
            f"changes alone, without stale keys and values, and the whole remedies. {setting}.",
            "A list of estimates with intervals, a line a change.",
        ),
        "fig-scratch-speed": (
            "Time of one step without a cache over that with it, by the text's length. Solid: logits of all rows, as in both "
            f"posts; dashed: of the last alone. {model}, and the reply's size with random weights. {timing}.",
            "Ratios rising with length on logarithmic axes, two lines a model, and a dotted line at 3.",
        ),
        "fig-scratch-cost": (
            "What each way loses past the first block against the time that it takes there, over the posted cache's. "
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
    return {
        name: {"name": name, "caption": caption} | ({"alt": alt} if alt else {})
        for name, (caption, alt) in said.items()
    }


def _training(model: dict) -> tuple[str, str]:
    """Read what a shipped checkpoint's training recorded: number of characters, held-out loss."""
    if model["weights"] != "stand-in" or model["name"] != f"scratch-{checkpoints.SMALL}":
        return "not recorded here", "not recorded here"
    about = json.loads((checkpoints.SHIPPED / "training.json").read_text("utf-8"))
    return f"{about['trained_characters']:,}", f"{about['held_out_nats_per_character']:.2f}"


def numbers(logits: Run, loss: Run, speed: Run) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    model = loss.about["models"][0]
    block = model["shape"]["block"]
    half = refill_name(max(1, block // 2))
    characters, held_out = _training(model)
    said = {
        "block": str(block),
        "table": f"{model['shape']['table']:,}",
        "layers": str(model["layers"]),
        "width": str(model["shape"]["width"]),
        "trained_characters": characters,
        "held_out": held_out,
        "half": str(max(1, block // 2)),
    }
    largest = tables.largest(logits.rows).set_index(["comparison", "where"])

    def spread(comparison: str, where: str, column: str = "max_abs") -> str:
        if (comparison, where) not in largest.index:
            return "not measured in this run"
        rows = largest.loc[[(comparison, where)]]
        return "; ".join(f"{DTYPES[r.dtype]} {_size(getattr(r, column))}" for r in rows.itertuples())

    said["posted_inside"] = spread(POSTED, tables.INSIDE)
    said["posted_behind"] = spread(POSTED, tables.BEHIND)
    said["refill_behind"] = spread(half, tables.BEHIND)
    said["replys_own_behind"] = spread(scratch_logits.REPLYS_OWN, tables.BEHIND)
    said["shuffled_behind"] = spread(scratch_logits.SHUFFLED, tables.BEHIND)
    said["late_behind"] = spread(scratch_logits.LATE, tables.BEHIND)
    for key, fix in zip(("append", "mask", "prompt", "modulo"), FIXES, strict=True):
        rows = logits.rows[logits.rows["comparison"] == fix]
        said[f"{key}_equal"] = f"{int((rows['max_abs'] == 0).sum())} of {len(rows)}"
        said[f"{key}_change"] = tables.gap_behind(loss.rows, fix, POSTED).text(_NATS)
    longer = logits.rows[(logits.rows["comparison"] == scratch_logits.LAST_ONLY) & (logits.rows["length"] > 1)]
    said["prompt_apart"] = f"{longer['max_abs'].min():.2g} to {longer['max_abs'].max():.2g}"
    for key, how in zip(("chunks_reply", "chunks_shifted", "chunks_none"), scratch_logits.CHUNKS, strict=True):
        said[key] = spread(how, tables.INSIDE)
    for key, way in (
        ("posted", POSTED),
        ("absolute", tables.ABSOLUTE),
        ("reply", tables.REPLY),
        ("forgotten", tables.FORGOTTEN),
        ("refill", half),
    ):
        said[f"{key}_gap"] = tables.gap_behind(loss.rows, way).text(_NATS)
    said["window_loss"] = tables.loss_behind(loss.rows, WINDOW).text("{:.2f}")
    share = tables.stale_share(loss.rows)
    said["stale_share"] = "not to be told in this run" if share is None else share.text("{:.0%}")
    said |= _speeds(loss.rows, speed.rows, half)
    return said


def _speeds(loss: pd.DataFrame, speed: pd.DataFrame, half: str) -> dict[str, str]:
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
    costs = tables.cost_table(loss, speed).set_index("way")
    said["refill_time"] = costs.loc[half, "time_ratio"].text("{:.2f}")
    said["window_time"] = costs.loc[WINDOW, "time_ratio"].text("{:.2f}")
    said["hops"] = ", ".join(way.rsplit(" ", 1)[1] for way in costs.index if way.startswith("refill"))
    return said
