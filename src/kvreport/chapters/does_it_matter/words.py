"""What the chapter on whether the difference matters says in words: captions, and the numbers of its prose."""

from collections.abc import Mapping

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.does_it_matter import drift_by_position, first_divergence, laid_out, tables, variants
from kvreport.chapters.does_it_matter.results import Results
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, power_of_ten

CACHE = variants.TOKENS.name


def _setting(run: Run) -> str:
    asked = run.about["settings"]
    dtypes = ", ".join(DTYPES[dtype] for dtype in asked["dtypes"])
    return f"{wording.models(run)}; {dtypes}; {wording.machine(run)}"


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    forced, positions, parting, behind = results.forced, results.positions, results.parting, results.behind
    asked = forced.about["settings"]
    half = asked["n_tokens"] // 2
    files = forced.rows["source"].nunique()
    texts = f"{asked['n_samples']} texts of {asked['n_tokens']} tokens of {wording.corpus(forced)}"
    scored = f"{texts}, the second half of each scored ({asked['n_tokens'] - half} tokens a text)"
    by_files = f"95 % intervals: bootstrap over {files} files"
    longest = int(positions.rows["read_to"].max())
    n_long = positions.rows["sample"].nunique()
    pairs = 0 if behind is None else behind.rows[["dtype", "sample"]].drop_duplicates().shape[0]
    wrote = f"{asked['n_samples']} prompts, {asked['n_tokens'] - half} tokens written to each"
    said = {
        "fig-matter-axes": (
            f"{_axes_found(forced.rows)} Mean Kullback-Leibler divergence of the next-token distribution from the baseline (one "
            "text, one pass, no cache), one change at a time, every token given. Top to bottom: only the rounding changes; fewer "
            "bits; a planted fault; and, hollow, what llama.cpp publishes of other models "
            f"{{cite}}`llamacppperplexity,llamacppkv`. {_setting(forced)}; {scored}; {by_files}.",
            "A list of changes with their mean divergence on a logarithmic axis, one marker a dtype, in three groups: only "
            "the rounding, fewer bits, a planted fault. Published values of llama.cpp stand below as hollow diamonds.",
        ),
        "tab-matter-axes": (
            "Every change, by dtype of the baseline: mean divergence in nats; share of tokens whose first choice is the "
            "baseline's; change of the perplexity. Behind ± stands half the 95 % interval. All statistics and their "
            "intervals are in the data under the figure above. "
            f"{_setting(forced)}; {scored}; {by_files}; a share of none or all has Wilson's, over files.",
            "",
        ),
        "tab-matter-tails": (
            "The tails, and other decisions: the divergence that 99 % of tokens stay below, in nats; root mean square change "
            "of the true token's probability, in percentage points; share of tokens at which the classification head decides "
            f"as on the baseline. {_setting(forced)}; {scored}; {by_files}; a share of none or all has Wilson's, over files.",
            "",
        ),
        "fig-matter-margins": (
            f"{_margins_found(forced.rows)} Top: how far the first choice is ahead of the second, in ulps of the largest logit. "
            "Bottom: share of first choices that are lost at such a margin, seen (bins of "
            f"{tables.FEWEST} comparisons or more, with an interval over files) and "
            "from the shifts alone, taken as independent of the margin. "
            f"{_setting(forced)}; {scored}; {len(_rounding(forced.rows))} ways together.",
            "Two panels over the margin on a logarithmic axis, a colour a dtype: above, a histogram of margins; below, the "
            "share of first choices lost, seen as points and expected as a dashed curve.",
        ),
        "fig-matter-partings": (
            f"{_partings_found(parting.rows)} Share of texts that are still the baseline's, token for token, behind so many "
            "tokens: Kaplan-Meier, with the 95 % band for the cache. Drawn: at temperature 1 with noise that all ways share. "
            "Dotted: what the margins and shifts of the fixed texts lead one to expect of the cache. "
            f"{_setting(parting)}; {wrote}.",
            "Falling staircases of the share of equal texts against tokens written, greedy above and drawn below: the cache "
            "in fp32 and bf16, and rounded caches and weights in the coarser dtype, with a dotted expected curve.",
        ),
        "tab-matter-partings": (
            "Where paths part. Lost choices: share of tokens on the fixed texts, seen, and expected from margins and shifts. "
            "One in: tokens to the first lost choice, were that share the chance at every step. Together: share of texts "
            "that no token tells from the baseline's at the end, Kaplan-Meier with its 95 % interval, and how many parted. "
            f"{_setting(parting)}; {wrote}.",
            "",
        ),
        "fig-matter-drift": (
            f"{_drift_found(results)} Changes are the last quarter over the first. "
            f"Top: divergence along {n_long} fixed texts of up to {longest:,} tokens, in bins; every token given. "
            + (
                f"Bottom: around the token at which two greedy texts part ({pairs} pairs), both read after one text, and each "
                "after its own; means over pairs. "
                if pairs
                else "No pair of greedy texts parted in this run, so there is nothing to follow behind a parting. "
            )
            + f"{_setting(positions)}.",
            "Above, curves of divergence against position, a line style a way and a colour a dtype. Below, where texts "
            "parted, divergence by tokens since then: filled where both read one text, hollow where each reads its own.",
        ),
    }
    return wording.published(said)


def _axes_found(forced: pd.DataFrame) -> str:
    """Say how far the cache moves predictions beside the other dtype, and whether the two can be told apart."""
    said = {}
    for dtype, ratio in tables.against_other_dtype(forced, CACHE).items():
        told = ratio.high < 1 or ratio.low > 1
        times = power_of_ten(ratio.value) if 0 < ratio.value < 0.01 else f"{ratio.value:.2f}"
        said[dtype] = f"{times} times as far{'' if told else ' (not to be told from 1)'}"
    return f"Beside computing in the other dtype, the cache moves predictions {wording.in_dtypes(said)}."


def _margins_found(forced: pd.DataFrame) -> str:
    """Say how many first choices rounding alone takes away, and at what margins."""
    compared = forced[forced["way"].isin(_rounding(forced))]
    lost = compared[compared["flip"] > 0]
    if lost.empty:
        return (
            f"In {len(compared):,} comparisons in which only the rounding changes, no first choice is seen to be lost."
        )
    flips = compared.groupby("dtype", sort=False)["flip"].agg(["sum", "size"])
    counts = wording.in_dtypes({row.Index: f"{row.sum:,.0f} of {row.size:,} times" for row in flips.itertuples()})
    margins = lost["margin"] / lost["ulp"]
    ties = int((margins == 0).sum())
    largest = f"{margins.max():,.3g}"
    at = (
        "all at exact ties"
        if ties == len(lost)
        else f"all at margins of at most {largest} ulp{'' if largest == '1' else 's'}"
        + (f" ({ties} exact tie{'s' * (ties > 1)})" if ties else "")
    )
    return f"When only the rounding changes, first choices are lost {counts}, {at}."


def _partings_found(parting: pd.DataFrame) -> str:
    """Say how many texts that are written with a cache part from the baseline's."""
    wrote = parting[parting["way"] == CACHE]
    steps = int(wrote["steps"].max())
    if not wrote["parted"].any():
        return f"Within {steps} tokens, none of {len(wrote)} texts written with a cache is seen to part from the baseline's."
    seen = {key: (int(part["parted"].sum()), len(part)) for key, part in wrote.groupby(["dtype", "choice"], sort=False)}
    return f"Within {steps} tokens, texts written with a cache part from the baseline's: {_by_choice(seen)}."


def _by_choice(seen: Mapping[tuple[str, str], tuple[int, int]]) -> str:
    """Write by choice, and within by dtype, how many pairs of texts parted."""
    said = []
    for choice in dict.fromkeys(choice for _, choice in seen):
        of_choice = {dtype: f"{parted} of {pairs}" for (dtype, one), (parted, pairs) in seen.items() if one == choice}
        said.append(f"{choice} {wording.in_dtypes(of_choice)}")
    return ", ".join(said)


def _drift_found(results: Results) -> str:
    """Say whether the cache's divergence grows along a text, and whether in proportion to the position."""
    ratios = results.growth
    ratios = ratios[ratios["way"] == drift_by_position.CHUNKS.name].set_index("dtype")["ratio"]
    if ratios.empty:
        return "No growth of the cache's divergence along a text can be given: at first there is none."
    proportion = _in_proportion(results.positions.rows)
    less = ratios.map(lambda ratio: ratio.high < proportion).all()
    said = wording.in_dtypes({dtype: f"{ratio.value:.2f}-fold" for dtype, ratio in ratios.items()})
    return (
        f"Along a text, divergence ({drift_by_position.CHUNKS.name}) changes {said}, "
        f"{'less' if less else 'not everywhere less'} than the position's {proportion:.1f}-fold."
    )


def _in_proportion(positions: pd.DataFrame) -> float:
    """Give the mean position in the last quarter of the bins over that in the first."""
    last = positions["bin"].max()
    middle = (positions["read_from"] + positions["read_to"]) / 2
    return middle[positions["bin"] > 3 * last / 4].mean() / middle[positions["bin"] <= last / 4].mean()


def _rounding(rows: pd.DataFrame) -> list[str]:
    return [way for way in dict.fromkeys(rows["way"]) if variants.BY_NAME[way].kind == "rounding"]


def numbers(results: Results) -> dict[str, str]:
    """Write the numbers of the prose."""
    return _of_axes(results) | _of_partings(results) | _of_positions(results)


def _each(table: pd.DataFrame, way: str, write) -> str:
    of_way = table[table["way"] == way]
    return "; ".join(f"{DTYPES[row.dtype]} {write(row)}" for row in of_way.itertuples()) or "not run"


def _of_axes(results: Results) -> dict[str, str]:
    forced, axes = results.forced.rows, results.axes
    rounding = forced[forced["way"].isin(_rounding(forced))]
    # Decisions on the baseline are the same in every way's rows.
    once = forced[forced["way"] == forced["way"].iloc[0]]
    equal = axes[axes["bits_equal_share"] == 1]
    said = {
        key: _each(axes, way, lambda row: laid_out.spread(row.kl))
        for key, way in (
            ("cache_kl", CACHE),
            ("dtype_kl", variants.OTHER_DTYPE.name),
            ("int8_kl", variants.KV_INT8.name),
            ("int4_kl", variants.KV_INT4.name),
            ("weights4_kl", variants.WEIGHTS_4.name),
            ("fault_kl", variants.LOST.name),
        )
    }
    return said | {
        "matter_in_short": in_short(axes),
        "over_the_dtype": over_the_dtype(axes),
        "cache_perplexity": _each(axes, CACHE, lambda row: f"{laid_out.change(row.perplexity_ratio)} %"),
        "perplexity": _each(axes, CACHE, lambda row: row.perplexity.text("{:.2f}")),
        "cache_below": "; ".join(
            f"{DTYPES[row.dtype]}: {tables.smaller_than(row.kl, results.published)}"
            for row in axes[axes["way"] == CACHE].itertuples()
        ),
        "static_kl": _each(axes, variants.STATIC.name, lambda row: laid_out.spread(row.kl)),
        "chunks_kl": _each(axes, variants.CHUNKS.name, lambda row: laid_out.spread(row.kl)),
        "no_difference": "; ".join(f"{row.way} in {DTYPES[row.dtype]}" for row in equal.itertuples()) or "none of them",
        "rounding_decisions": f"{int(rounding['decision_flip'].sum()):,} of {len(rounding):,}",
        "weights4_decisions": _each(axes, variants.WEIGHTS_4.name, lambda row: f"{1 - row.same_decision.value:.1%}"),
        "head_right": f"{once['decision_right'].mean():.0%}",
    }


def in_short(axes: pd.DataFrame) -> str:
    """Answer in a sentence how far a cache moves predictions, by the yardstick of `over_the_dtype`."""
    limits = (
        (0.01, "next to nothing"),
        (0.5, "less than a change of dtype"),
        (2.0, "about as much as a change of dtype"),
    )

    def plainly(ratio: float) -> str:
        return next((words for limit, words in limits if ratio <= limit), "more than a change of dtype")

    said = wording.in_dtypes({dtype: plainly(ratio) for dtype, ratio in _over_the_dtype(axes).items()})
    return f"It moves predictions {said}." if said else "That was not run."


def over_the_dtype(axes: pd.DataFrame) -> str:
    """Give the cache's mean divergence over that of computing in another dtype, for every dtype in which both were run."""
    said = {dtype: wording.percent(ratio) for dtype, ratio in _over_the_dtype(axes).items()}
    return wording.in_dtypes(said) or "not run"


def _over_the_dtype(axes: pd.DataFrame) -> dict[str, float]:
    moved = axes[axes["kl"].notna()].pivot(index="dtype", columns="way", values="kl").reindex(axes["dtype"].unique())
    ways = [CACHE, variants.OTHER_DTYPE.name]
    if not set(ways) <= set(moved.columns):
        return {}
    return {dtype: cache.value / other.value for dtype, cache, other in moved[ways].dropna().itertuples()}


def _at_ties(of_way: pd.DataFrame) -> str:
    """Count the lost first choices that were no better than the second: the order of the vocabulary had decided."""
    lost = of_way[of_way["flip"] > 0]
    counts = lost["margin"].eq(0).groupby(lost["dtype"], sort=False).agg(["sum", "size"])
    return "; ".join(f"{DTYPES[row.Index]} {row.sum} of {row.size}" for row in counts.itertuples()) or "none"


def _of_partings(results: Results) -> dict[str, str]:
    forced, partings, curves = results.forced.rows, results.partings, results.curves
    ties = {dtype: (part["margin"] == 0).mean() for dtype, part in forced.groupby("dtype", sort=False)}
    smallest = {dtype: (part["margin"] / part["ulp"]).min() for dtype, part in forced.groupby("dtype", sort=False)}
    return {
        "ties": "; ".join(f"{DTYPES[dtype]} {share:.1%}" for dtype, share in ties.items()),
        "smallest_margin": "; ".join(f"{DTYPES[dtype]} {laid_out.tokens(ulps)}" for dtype, ulps in smallest.items()),
        "one_in": _each(partings, CACHE, lambda row: laid_out.tokens(row.position)),
        "flips_seen": _each(partings, CACHE, lambda row: row.flip_share.text("{:.2%}")),
        "flips_at_ties": _at_ties(forced[forced["way"] == CACHE]),
        "flips_expected": _each(partings, CACHE, lambda row: laid_out.spread(row.expected_flips)),
        "partings": _by_choice(
            {
                (dtype, choice): (curve.parted, curve.pairs)
                for (dtype, choice, way), curve in curves.items()
                if way == CACHE
            }
        ),
        "assisted_parted": "; ".join(
            f"{DTYPES[dtype]} {curve.parted} of {curve.pairs}"
            for (dtype, choice, way), curve in curves.items()
            if (choice, way) == (first_divergence.GREEDY, first_divergence.ASSISTED)
        ),
    }


def _of_positions(results: Results) -> dict[str, str]:
    behind = results.snowball
    said = {
        "n_long": f"{results.positions.rows['sample'].nunique()}",
        "long_way": drift_by_position.CHUNKS.name,
        "growth": _each(results.growth, drift_by_position.CHUNKS.name, lambda row: row.ratio.text("{:.2f}")),
    }
    if behind is None:
        nothing = "not seen in this run, in which no greedy text parted"
        return said | {"before_parting": nothing, "behind_parting": nothing, "behind_equal": nothing}
    parts = behind.groupby("dtype", sort=False)
    return said | {
        "before_parting": "; ".join(f"{DTYPES[d]} {power_of_ten(part['kl_forced'].mean())}" for d, part in parts),
        "behind_parting": "; ".join(
            f"{DTYPES[d]} {part.loc[part['offset'] > 0, 'kl_free'].mean():.2g}" for d, part in parts
        ),
        "behind_equal": "; ".join(
            f"{DTYPES[d]} {part.loc[part['offset'] > 0, 'token_equal'].mean():.0%}" for d, part in parts
        ),
    }
