"""The numbers and statements of the chapter on the atlas."""

from collections.abc import Callable

from kvbook.atlas import configurations, feeding, table
from kvreport.chapters.atlas import results, tables
from kvreport.chapters.atlas.results import Results
from kvreport.publishing import wording
from kvreport.publishing.judging import Measured, fact
from kvreport.publishing.rules import HALF, Bound, Quantity, every
from kvreport.publishing.statements import Statement

EXPERIMENTS = results.EXPERIMENTS
# Of fewer architectures a share says nothing about transformers.
_WHOLE = 150
_NONE = Bound(0, "arithmetic", "none")
_NINE_IN_TEN = Bound(0.9, "ours", "nine in ten", "share")


def _share(count: Callable[[Results], int], total: Callable[[Results], int]) -> Callable[[Results], list[Measured]]:
    """Measure a share of architectures, of a run that has nearly all of them."""
    return lambda found: [fact(count(found) / total(found))] if len(found.rows) >= _WHOLE else []


def _verdicts(*words: str) -> Callable[[Results], int]:
    return lambda found: sum(table.verdict(row) in words for row in found.rows)


def _ran(found: Results) -> int:
    return len(found.rows) - _verdicts("does not run")(found)


def _invariant(*words: str) -> Callable[[Results], int]:
    return lambda found: sum(tables.invariant(row) in words for row in found.rows)


def _tried(found: Results) -> int:
    return sum(tables.invariant(row) is not None for row in found.rows)


def _first(dtype: str, kind: str | None = None) -> Callable[[Results], int]:
    def count(found: Results) -> int:
        rows = found.operations[found.operations["dtype"] == dtype]
        return int(rows.loc[rows["kind"] == kind if kind else rows.index, "architectures"].sum())

    return count


def _wrong(found: Results) -> dict[str, int]:
    rows = found.paths[found.paths["outcome"] == tables.BUG]
    return dict(zip(rows["path"], rows["architectures"], strict=True))


def _chunks_lead(found: Results) -> list[Measured]:
    wrong = _wrong(found)
    others = max((count for path, count in wrong.items() if path != "chunks"), default=0)
    return [fact(wrong.get("chunks", 0) - others)] if len(found.rows) >= _WHOLE else []


def _prompts(found: Results) -> list[str]:
    asked = (row.get("cache as long as the prompt", tables.NOT_ASKED) for row in found.rows)
    return [answer for answer in asked if answer != tables.NOT_ASKED]


def _twice(found: Results) -> int:
    return _prompts(found).count("fed twice")


def _of_cropped(*answers: str) -> Callable[[Results], int]:
    """Count those that feed the prompt twice and answer so when their cache is cropped."""
    return lambda found: sum(
        row["cropped"].startswith(answers)
        for row in found.rows
        if row.get("cache as long as the prompt") == "fed twice"
    )


_SHARE = "share of the architectures that"
STATEMENTS: dict[str, Statement[Results]] = {
    "caches-are-sound": Statement(
        every(Quantity(f"{_SHARE} run whose cache is exact or rounds"), "above", _NINE_IN_TEN),
        _share(_verdicts(tables.EXACT, tables.ROUNDING), _ran),
    ),
    "none-differs-silently": Statement(
        every(
            Quantity(
                "architectures that differ under row-invariant mode",
                form="{:.0f}",
                census="all architectures that were tried",
            ),
            "at most",
            _NONE,
        ),
        lambda found: [fact(_invariant(tables.DIFFERENT)(found))],
        headline=True,
    ),
    "row-invariant-covers-most": Statement(
        every(
            Quantity(f"{_SHARE} were tried in row-invariant mode and are bitwise exact"),
            "at least",
            Bound(0.95, "ours", "nineteen in twenty", "share"),
        ),
        _share(_invariant(tables.EXACT), _tried),
    ),
    "chunks-are-worst": Statement(
        every(Quantity("architectures wrong in chunks, less those of any other path", form="{:.0f}"), "above", _NONE),
        _chunks_lead,
    ),
    "prompt-fed-twice": Statement(
        every(Quantity(f"{_SHARE} take such a cache and feed the prompt twice"), "above", _NINE_IN_TEN),
        _share(_twice, lambda found: len(_prompts(found))),
    ),
    "fp32-products-first": Statement(
        every(Quantity(f"{_SHARE} were searched in fp32 and begin with a linear layer"), "above", _NINE_IN_TEN),
        _share(_first("float32", "linear"), _first("float32")),
        scope="this processor",
    ),
    "bf16-attention-first": Statement(
        every(Quantity(f"{_SHARE} were searched in bf16 and begin with attention"), "above", HALF),
        _share(_first("bfloat16", "attention"), _first("bfloat16")),
        scope="this processor",
    ),
}


def _text(count: Callable[[Results], int]) -> Callable[[Results], str]:
    return lambda found: str(count(found))


def _of(count: Callable[[Results], int], total: Callable[[Results], int]) -> Callable[[Results], str]:
    return lambda found: f"{count(found)} of {total(found)}"


def _refused(found: Results) -> str:
    return wording.listed([row["architecture"] for row in found.rows if tables.invariant(row) == tables.REFUSED])


NUMBERS: dict[str, Callable[[Results], str]] = {
    "atlas_version": lambda found: found.run.about["machine"]["transformers"],
    "atlas_listed": lambda found: str(len(found.rows)),
    "atlas_ran": _text(_ran),
    "atlas_sound": _text(_verdicts(tables.EXACT, tables.ROUNDING)),
    "atlas_bug": _text(_verdicts(tables.BUG)),
    "atlas_not_run": _text(_verdicts("does not run")),
    "atlas_tried": _text(_tried),
    "atlas_exact": _text(_invariant(tables.EXACT)),
    "atlas_refused": _text(_invariant(tables.REFUSED)),
    "atlas_refused_names": _refused,
    "atlas_chunks": lambda found: str(_wrong(found).get("chunks", 0)),
    "atlas_fp32_linear": _of(_first("float32", "linear"), _first("float32")),
    "atlas_bf16_attention": _of(_first("bfloat16", "attention"), _first("bfloat16")),
    "atlas_fed_twice": _of(_twice, lambda found: len(_prompts(found))),
    "atlas_croppable": _of(_of_cropped(tables.EXACT, tables.ROUNDING), _twice),
    "atlas_recurrent": _text(_of_cropped("not applicable: cannot be cropped: it holds a recurrent state")),
    "atlas_length": lambda _: str(feeding.LENGTH),
    "atlas_window": lambda _: str(configurations.WINDOW),
}
