"""The numbers and statements of the chapter on the atlas."""

from collections.abc import Callable

from kvbook.atlas import configurations, feeding, table
from kvbook.atlas.feeding import PADDED, PATHS, STATIC, WHOLE
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


def _on(path: str, *outcomes: str) -> Callable[[Results], int]:
    """Count the architectures of a figure's bar that come out so."""

    def count(found: Results) -> int:
        rows = found.paths[found.paths["path"] == path]
        return int(rows.loc[rows["outcome"].isin(outcomes), "architectures"].sum())

    return count


def _chunks_lead(found: Results) -> list[Measured]:
    wrong = {path: _on(path, table.BUG)(found) for path in PATHS}
    in_chunks = min(wrong.pop("chunks"), wrong.pop(STATIC))
    return [fact(in_chunks - max(wrong.values()))] if len(found.rows) >= _WHOLE else []


_judged, _sound = _verdicts(*table.JUDGED), _verdicts(table.EXACT, table.ROUNDING)
_twice, _whole_prompts = _on(WHOLE, table.FED_TWICE), _on(WHOLE, table.FED_TWICE, *table.JUDGED)


def _undeclared(found: Results) -> dict[str, bool]:
    """Name the architectures that are wrong with a static cache that their class does not declare; and whether only there."""
    return {
        row["architecture"]: not any(row[path] == table.BUG for path in PATHS if path != STATIC)
        for row in found.rows
        if row.get(STATIC) == table.BUG and not table.is_declared(row, STATIC)
    }


def _differing(found: Results) -> list[Measured]:
    """Count the architectures that come out otherwise than in the rows that the book prints."""
    if len(found.rows) < _WHOLE:
        return []
    return [fact(int((tables.compared(found.rows, Results.of_book().rows)["outcome"] == "differs").sum()))]


def _recurrent(found: Results) -> int:
    """Count those that feed the prompt twice and hold what cannot be cropped."""
    return sum(
        any("recurrent state" in reason for reason in row.get("cropped, not tried", {}).values())
        for row in found.rows
        if row.get(WHOLE) == table.FED_TWICE
    )


def _croppable(found: Results) -> int:
    return sum(
        row["cropped"] in (table.EXACT, table.ROUNDING) for row in found.rows if row.get(WHOLE) == table.FED_TWICE
    )


_SHARE = "share of the architectures that"
STATEMENTS: dict[str, Statement[Results]] = {
    "caches-are-sound": Statement(
        every(Quantity(f"{_SHARE} could be judged whose cache is exact or rounds"), "above", _NINE_IN_TEN),
        _share(_sound, _judged),
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
        _share(_invariant(table.EXACT), _tried),
    ),
    "chunks-are-worst": Statement(
        every(
            Quantity("architectures wrong in chunks, with either cache, minus those of any other path", form="{:.0f}"),
            "above",
            _NONE,
        ),
        _chunks_lead,
    ),
    "prompt-fed-twice": Statement(
        every(Quantity(f"{_SHARE} take such a cache and are fed the prompt twice"), "above", _NINE_IN_TEN),
        _share(_twice, _whole_prompts),
    ),
    "verdicts-agree": Statement(
        every(Quantity("architectures whose verdict another processor's rows change", form="{:.0f}"), "at most", _NONE),
        _differing,
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
    "atlas_judged": _text(_judged),
    "atlas_sound": _text(_sound),
    "atlas_bug": _text(_verdicts(table.BUG)),
    "atlas_raises": _text(_verdicts(table.RAISES)),
    "atlas_undeclared": lambda found: str(len(_undeclared(found))),
    "atlas_undeclared_only": lambda found: str(sum(_undeclared(found).values())),
    "atlas_padding": _text(_on(PADDED, table.PADDING_CHANGES)),
    "atlas_not_run": _text(_verdicts("does not run")),
    "atlas_tried": _text(_tried),
    "atlas_exact": _text(_invariant(table.EXACT)),
    "atlas_refused": _text(_invariant(tables.REFUSED)),
    "atlas_refused_names": _refused,
    "atlas_chunks": _text(_on("chunks", table.BUG)),
    "atlas_static": _text(_on(STATIC, table.BUG)),
    "atlas_static_raises": _text(_on(STATIC, table.RAISES)),
    "atlas_fp32_linear": _of(_first("float32", "linear"), _first("float32")),
    "atlas_bf16_attention": _of(_first("bfloat16", "attention"), _first("bfloat16")),
    "atlas_fed_twice": _of(_twice, _whole_prompts),
    "atlas_croppable": _of(_croppable, _twice),
    "atlas_recurrent": _text(_recurrent),
    "atlas_length": lambda _: str(feeding.LENGTH),
    "atlas_window": lambda _: str(configurations.WINDOW),
}
