"""What the chapter on the atlas says in words: captions, and the numbers of its prose."""

from kvbook.atlas import configurations, feeding, table
from kvbook.runs.records import Run
from kvreport.chapters.atlas import tables
from kvreport.chapters.atlas.results import Results
from kvreport.publishing import wording

_WHERE = (
    "Tiny models of each class, seeded random weights, texts of {length} tokens, windows of {window}; {machine}, "
    "transformers {version}"
)


def _where(run: Run) -> str:
    about = run.about["machine"]
    return _WHERE.format(
        length=feeding.LENGTH, window=configurations.WINDOW, machine=wording.machine(run), version=about["transformers"]
    )


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    said, where = numbers(results), _where(results.published)
    own = results.own.about["machine"]
    return wording.published(
        {
            "fig-atlas-outcomes": (
                f"The cache of {said['atlas_bug']} of {said['atlas_ran']} architectures that run is wrong on some path. "
                f"Row-invariant mode makes {said['atlas_exact']} of {said['atlas_tried']} bitwise exact. "
                f"Top: the worst verdict of any path. Bottom: fp32 and bf16, all paths that are sound. {where}.",
                "Two stacked bars of architectures: what the cache is on stock arithmetic, and under row-invariant mode.",
            ),
            "fig-atlas-paths": (
                f"A cache is most often wrong in {said['atlas_worst_path']}. Verdict of each execution path, of the "
                "architectures that are causal and return a cache. “Padding counts”: the full pass itself changes "
                f"with padding. {where}.",
                "Stacked bars of architectures by verdict, one bar for each of six execution paths.",
            ),
            "fig-atlas-operations": (
                f"In fp32 the first operation that depends on the number of tokens is {said['atlas_kind_fp32']}; in bf16 it "
                f"is {said['atlas_kind_bf16']}. First operation, in order of execution, whose result for a token is not "
                f"bitwise identical when 1, 7 or 23 tokens are fed and not {feeding.LENGTH}, on inputs with equal bits. "
                f"{where}.",
                "Bars of architectures by the kind of the first operation that differs, in fp32 and in bf16.",
            ),
            "tab-atlas": (
                "Every causal architecture, each linked to its badge. First operation: in the first layer, unless another one is "
                "named. Drift: largest over paths, root mean square difference of the logits over their "
                f"spread. {where}.",
                "",
            ),
            "tab-atlas-bugs": (f"Paths on which a cache is wrong, and the first wrong position. {where}.", ""),
            "tab-atlas-yours": (
                f"The same verdicts on this machine ({own['device_name']}, transformers {own['transformers']}) and in the "
                f"published run ({wording.machine(results.published)}).",
                "",
            ),
        }
    )


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the prose quotes, by its glue key."""
    rows, about = results.rows, results.published.about["machine"]
    verdicts = [table.verdict(row) for row in rows]
    switched = [tables.invariant(row) for row in rows if tables.invariant(row)]
    refused = [row["architecture"] for row in rows if tables.invariant(row) == tables.REFUSED]
    prompts = [row.get("cache as long as the prompt", tables.NOT_ASKED) for row in rows]
    asked = [each for each in prompts if each != tables.NOT_ASKED]
    return {
        "atlas_listed": str(len(rows)),
        "atlas_ran": str(len(rows) - verdicts.count("does not run")),
        "atlas_rounding": str(verdicts.count(tables.ROUNDING)),
        "atlas_sound": str(verdicts.count(tables.ROUNDING) + verdicts.count(tables.EXACT)),
        "atlas_undecided": str(verdicts.count("undecided")),
        "atlas_bug": str(verdicts.count(tables.BUG)),
        "atlas_no_cache": str(verdicts.count("no cache")),
        "atlas_not_causal": str(verdicts.count("not causal")),
        "atlas_not_run": str(verdicts.count("does not run")),
        "atlas_tried": str(len(switched)),
        "atlas_exact": str(switched.count(tables.EXACT)),
        "atlas_refused": str(len(refused)),
        "atlas_refused_names": wording.listed(refused) or "none",
        "atlas_different": str(switched.count(tables.DIFFERENT)),
        "atlas_worst_path": _worst_path(results),
        "atlas_kind_fp32": _most_often(results, "float32"),
        "atlas_kind_bf16": _most_often(results, "bfloat16"),
        "atlas_fed_twice": f"{asked.count('fed twice')} of {len(asked)}",
        "atlas_agree": f"{(results.compared['outcome'] == 'agrees').sum()} of {len(results.compared)}",
        "atlas_version": about["transformers"],
    }


def _worst_path(results: Results) -> str:
    wrong = results.paths[results.paths["outcome"] == tables.BUG].sort_values("architectures", ascending=False)
    if wrong.empty:
        return "no path"
    first = wrong.iloc[0]
    return f"`{first['path']}` ({first['architectures']} architectures)"


def _most_often(results: Results, dtype: str) -> str:
    counted = results.operations[results.operations["dtype"] == dtype].sort_values("architectures", ascending=False)
    if counted.empty:
        return "not known"
    first, total = counted.iloc[0], counted["architectures"].sum()
    return f"most often of kind `{first['kind']}` ({first['architectures']} of {total})"
