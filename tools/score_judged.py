"""Write what `kvbook scores` says of recorded rows: ``data/scores/held_out.txt`` and ``data/scores/clean.txt``.

    python tools/score_judged.py

Faults are those of ``data/scores/faults.csv.gz``.  Clean comparisons pair ways of computing the same numbers that the
book recorded for "Does it matter" on two processors, in fp32, fp16 and bf16; texts are taken as runs have them, and
all together.  No noise is drawn.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pandas as pd
import yaml

from kvbook import paths
from kvbook.scores import outcome, tables

FOLDER = paths.DATA / "scores"
FAULTS = FOLDER / "faults.csv.gz"
# Ways that are sound: those that reuse no state, which trainers and controls have, and others.
WHOLE, BATCHED, PADDED, EAGER = STATELESS = ("full", "batch of 8", "batch of 8, left-padded", "eager attention")
CACHED = ("cache, token by token", "cache, 5 tokens at once", "static cache, 5 at once")
WRONG = "fault: a cached token lost"


def case(rows: pd.DataFrame, control: bool = True) -> outcome.Outcome:
    """Judge the rows of one fault."""
    sides = [rows[["id", "position", "token", "step"]].assign(logprob=rows[name]).reset_index(drop=True)
             for name in ("rollout", "trainer", "control")]
    return outcome.of(tables.join(sides[0], sides[1], sides[2:] if control else []))


def shifted(rows: pd.DataFrame, by: int) -> pd.DataFrame:
    """Move the rollout's column within each sequence; where nothing comes from, the ends take each other's."""
    moved = rows.groupby("id")["rollout"].transform(lambda column: np.roll(column, by))
    return rows.assign(rollout=moved)


def swapped(rows: pd.DataFrame) -> pd.DataFrame:
    """Give the first two sequences each other's values in the rollout; all are equally long."""
    first, second, *_ = rows["id"].unique()
    values = rows["rollout"].to_numpy().copy()
    one, other = rows["id"].to_numpy() == first, rows["id"].to_numpy() == second
    values[one], values[other] = values[other], values[one].copy()
    return rows.assign(rollout=values)


def faults() -> dict[tuple[str, str], pd.DataFrame]:
    """Read every case by name and dtype, and add those that need no model."""
    table = pd.read_csv(FAULTS)
    found = {key: rows.reset_index(drop=True) for key, rows in table.groupby(["case", "dtype"], sort=False)}
    for dtype in table["dtype"].unique():
        clean = found["clean", dtype]
        found |= {("shift", dtype): shifted(clean, 1), ("shift_by_two", dtype): shifted(clean, 2),
                  ("rows_swapped", dtype): swapped(clean)}
    return found


def held_out() -> list[str]:
    """Say of each fault of the list what it was called: with a control, and alone."""
    listed = yaml.safe_load((FOLDER / "held_out.yaml").read_text("utf-8"))
    lines, names, seen, n = [], Counter(), 0, 0
    for (name, dtype), rows in faults().items():
        if name not in listed:
            continue
        found, alone = case(rows), case(rows, control=False)
        called, expected = (found.causes[0].key if found.causes else None), listed[name]["named"]
        n, seen = n + 1, seen + (found.verdict == "fault")
        names["none" if called is None else "the expected name" if called == expected else "another"] += 1
        lines.append(f"{name:19s} {dtype:9s} {found.verdict:10s} {called or '-':14s} {expected or '-':14s} "
                     f"{alone.verdict:10s} {found.measures['mean_abs']:.1e}")
    titles = ("fault", 19), ("dtype", 9), ("verdict", 10), ("called", 14), ("expected", 14), ("no control", 10)
    head = " ".join(f"{title:{width}s}" for title, width in titles) + " mean |Δ log p|"
    by = ", ".join(f"{count} by {name}" for name, count in names.most_common())
    return [head, *lines, f"{seen} of {n} are called a fault: {by}"]


def groups() -> Iterator[tuple[str, str, dict[str, pd.DataFrame]]]:
    """Yield a processor, a dtype, and tables by way: a run at a time, then each processor's runs together."""
    together: dict[tuple[str, str], list[dict[str, pd.DataFrame]]] = {}
    for number, file in enumerate(sorted((paths.RECORDED_RUNS / "teacher_forced").glob("*/rows.csv.gz"))):
        processor = "AMD EPYC" if file.parent.name.startswith("amd") else "Intel Xeon"
        columns = ["dtype", "way", "sample", "position", "nll", "dlogp"]
        for dtype, rows in pd.read_csv(file, usecols=columns).groupby("dtype"):
            ways = {way: part.reset_index(drop=True) for way, part in rows.groupby("way")}
            about = ways[CACHED[0]]
            keys = pd.DataFrame({"id": about["sample"] + 1000 * number, "position": about["position"], "token": 0})
            others = (*CACHED, WRONG, *STATELESS[1:])
            found = {way: keys.assign(logprob=ways[way]["dlogp"] - ways[way]["nll"]) for way in others}
            found[WHOLE] = keys.assign(logprob=-about["nll"])
            together.setdefault((processor, str(dtype)), []).append(found)
            yield processor, str(dtype), found
    for (processor, dtype), runs in together.items():
        yield processor, dtype, {way: pd.concat([run[way] for run in runs], ignore_index=True) for way in runs[0]}


def compared(rollout: str | None = None) -> Iterator[tuple[str, str, str, outcome.Outcome]]:
    """Judge every way against every trainer, with each control and without; of one rollout alone where it is named."""
    for processor, dtype, found in groups():
        stateless = [way for way in found if way in STATELESS]
        rollouts = [rollout] if rollout else [way for way in found if way != WRONG]
        for a, b in itertools.product(rollouts, stateless):
            for control in [None, *(way for way in stateless if way not in (a, b))] if a != b else ():
                controls = [found[control]] if control else []
                yield processor, dtype, control or "", outcome.of(tables.join(found[a], found[b], controls))


def clean() -> list[str]:
    """Count verdicts on clean comparisons."""
    counts = Counter((processor, dtype, "with a control" if control else "without one", found.verdict)
                     for processor, dtype, control, found in compared())
    lines = [f"{processor:11s} {dtype:9s} {control:15s} {kind:10s} {count:5d}"
             for (processor, dtype, control, kind), count in sorted(counts.items())]
    fired = sum(count for key, count in counts.items() if key[3] == "fault")
    return [*lines, f"{sum(counts.values())} clean comparisons, {fired} called a fault"]


def main() -> None:
    """Write both."""
    for name, lines in (("held_out", held_out()), ("clean", clean())):
        (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n", "utf-8")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
