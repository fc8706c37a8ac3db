"""The rows of the chapter on the atlas by name; to read them takes no torch."""

import json
from typing import Any

import pandas as pd

from kvbook.atlas import CROPPED, PADDED, PATHS, STATIC, SWITCHED, table
from kvbook.diagnosis.outcome import PADDING_COUNTS
from kvbook.runs.records import Run
from kvreport.publishing import found

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"atlas": 1}

REFUSED, DIFFERENT = "refused", "different"
# Of fewer architectures a share says nothing about transformers.
_ENOUGH = 150
_TELLS_NOTHING = ("not applicable: takes no position_ids", "right", "other tokens")


def judged(run: Run) -> list[dict[str, Any]]:
    """Return a run's rows as the atlas has them, by architecture and judged, with the versions they depend on."""
    versions = {name: run.about["machine"][name] for name in ("transformers", "torch")}
    found = [
        {key: value for key, value in row.items() if not pd.isna(value)} | versions
        for row in run.rows.to_dict("records")
    ]
    for row in found:
        row |= {key: json.loads(value) for key, value in row.items() if str(value).startswith("{")}
        row |= {key: int(value) for key, value in row.items() if key.endswith(("position", "tokens fed", "parameters"))}
        if "chunks" in row:
            _of_one_word(row)
    return sorted(map(table.judged, found), key=lambda row: row["architecture"])


def _of_one_word(row: dict[str, Any]) -> None:
    """Read a row from before each dtype kept its outcome: a word for each path, and one failure for all dtypes.

    What such a word does not tell is left out: it reads "not recorded there".
    """
    words = {path: row.pop(path) for path in PATHS if path in row}
    for path, word in words.items():
        reason = word.removeprefix("not applicable").lstrip(": ")
        # One dtype's failure stood for all, and tokens that agree by chance for a path that is right.
        if (reason == PADDING_COUNTS and words[PADDED] in (table.EXACT, table.ROUNDING)) or word in _TELLS_NOTHING:
            continue
        if f"{path}, drift" in row:
            row[f"{path}, drift"] = {dtype: [drift] for dtype, drift in row[f"{path}, drift"].items()}
            row |= {f"{path}, declared": False} if word == "wrong, and not declared" else {}
        elif word == "fed twice":
            # The prompt of those runs.
            row[f"{path}, tokens fed"] = 10
        elif reason == word or reason.startswith("raises"):
            row[f"{path}, error"] = {"": reason.removeprefix("raises ")}
        else:
            row[f"{path}, not tried"] = {"": reason}


def invariant(row: dict[str, Any]) -> str | None:
    """Say in a word what row-invariant arithmetic makes of an architecture; None where it was not tried."""
    return row["row_invariant"].split(":")[0] if "row_invariant" in row else None


def architectures(atlas: Run) -> pd.DataFrame:
    """Return a line for each architecture: its row, as the atlas makes it, and what is counted of it."""
    return _counted(judged(atlas))


def _counted(rows: list[dict[str, Any]]) -> pd.DataFrame:
    verdict = pd.Series([table.verdict(row) for row in rows], dtype=object)
    switched = pd.Series([invariant(row) for row in rows], dtype=object)
    return pd.DataFrame({
        "architecture": [row["architecture"] for row in rows], "row": rows, "enough": len(rows) >= _ENOUGH,
        "verdict": verdict, "ran": verdict != "does not run", "judged": verdict.isin(table.JUDGED),
        "sound": verdict.isin((table.EXACT, table.ROUNDING)), "bug": verdict == table.BUG,
        "raises": verdict == table.RAISES, "invariant": switched, "tried": switched.notna(),
        "exact": switched == table.EXACT, "refused": switched == REFUSED, "different": switched == DIFFERENT,
        "undeclared": [row.get(STATIC) == table.BUG and not table.is_declared(row, STATIC) for row in rows],
        "elsewhere": [any(row.get(path) == table.BUG for path in PATHS if path != STATIC) for row in rows],
        "croppable": [row.get(CROPPED) in (table.EXACT, table.ROUNDING) for row in rows],
        "recurrent": ["recurrent state" in str(row.get(f"{CROPPED}, not tried")) for row in rows],
    })


def paths(architectures: pd.DataFrame) -> pd.DataFrame:
    """Return what each causal architecture with a cache comes to on each path."""
    of = architectures[architectures["judged"]]
    parts = [of.assign(path=path, outcome=[row.get(path, table.NOT_RECORDED) for row in of["row"]]) for path in PATHS]
    # Published rows may be older than a path.
    every = pd.concat([part for part in parts if (part["outcome"] != table.NOT_RECORDED).any()] or parts)
    outcomes = {"wrong": table.BUG, "error": table.RAISES, "twice": table.FED_TWICE, "padding": table.PADDING_CHANGES}
    return every.assign(**{name: every["outcome"] == outcome for name, outcome in outcomes.items()})


def first_operations(architectures: pd.DataFrame) -> pd.DataFrame:
    """Return the kind of the first operation whose result for a token depends on how many come with it, by dtype."""
    parts = [
        architectures.assign(
            dtype=dtype, kind=[row.get(f"first kind, {dtype}", "fails") for row in architectures["row"]]
        )
        for dtype in SWITCHED
    ]
    found = pd.concat(parts).query("kind != 'fails'")
    return found.assign(linear=found["kind"] == "linear", attention=found["kind"] == "attention")


def _against(architectures: pd.DataFrame, book: pd.DataFrame) -> pd.DataFrame:
    """Set a run's verdicts beside the published ones of the same architectures."""
    said = ["architecture", "verdict", "invariant"]
    both = architectures[[*said, "enough"]].merge(book[said], on="architecture", suffixes=("", ", published"))
    both = both.fillna({"invariant": "not tried", "invariant, published": "not tried"})
    agree = [both[name] == both[f"{name}, published"] for name in ("verdict", "invariant")]
    return both.assign(differs=~(agree[0] & agree[1]))


def against_the_book(architectures: pd.DataFrame) -> pd.DataFrame:
    """Set a run's verdicts beside the book's."""
    return _against(architectures, found.printed("atlas")["architectures"])
