"""Making published evidence: the runs that chapters ask for in ``chapter.yaml``, recorded one by one and cited.

A chapter names groups of experiments::

    evidence:
      - experiments: [layer_drift]
        seeds: [0, 1, 2, 3]
        parameters: {n_samples: 50}

Each experiment at each seed is a cell of twenty minutes or less.  It runs with the parameter set ``trained`` and what
its group says over it, is recorded when it is done, and is cited in ``data/evidence.yaml``.  Cells that are recorded
for this kind of processor are passed over, so an interrupted command goes on where it was.  Groups of the role "fewer
instructions" are made where the environment holds a library back, as ``ONEDNN_MAX_CPU_ISA=AVX2`` does, and only there.
"""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean

from kvbook import UserError, progress
from kvbook.runs import Experiment, evidence, machine, recording, records
from kvbook.runs.threads import THREADS_VARIABLE
from kvbook.settings import Settings
from kvreport.publishing import found, processors
from kvreport.running import planning

# The parameter set that a chapter's evidence starts from.
PROFILE = "trained"


@dataclass(frozen=True)
class Cell:
    """One run that is to be recorded.

    Attributes
    ----------
    chapter : str
        The name of the chapter's folder.
    role : str
        What the chapter cites it as.
    experiment : Experiment
        What is run.
    settings : Settings
        With what.
    """

    chapter: str
    role: str
    experiment: Experiment
    settings: Settings

    @property
    def label(self) -> str:
        """Say which it is."""
        return f"{self.chapter}: {self.experiment.name}, seed {self.settings.seed}"

    def cited(self) -> list[records.Run]:
        """List the cited runs of these settings, whatever processor they were made on."""
        # A run from before there was a setting was made with what is its default.
        only = self.experiment.fields and {*self.experiment.fields}
        before, asked = (of.model_dump(mode="json", include=only) for of in (self.experiment.settings(), self.settings))
        roles = (self.role, *evidence.OTHER_KINDS) if self.role == evidence.PUBLISHED else (self.role,)
        cited = evidence.folders(self.chapter, *roles)
        runs = (records.load(folder) for folder in cited if folder.parent.name == self.experiment.name)
        of = self.experiment.revision, asked
        return [run for run in runs if (run.about.get("revision", 1), before | run.about["settings"]) == of]

    def is_recorded(self) -> bool:
        """Tell whether one was made on this kind of processor."""
        here = machine.describe(self.settings.device)["processor"]
        return here in {run.about["machine"]["processor"] for run in self.cited()}

    def seconds(self) -> float | None:
        """Say how long it took on other kinds of processor, on average; None where no kind has it."""
        ends = [[datetime.fromisoformat(run.about[end]) for end in ("started", "finished")] for run in self.cited()]
        return fmean((finished - started).total_seconds() for started, finished in ends) if ends else None


def cells(timed: bool, only: Iterable[str] = ()) -> Iterator[Cell]:
    """List what chapters ask for: what measures time, or what does not."""
    planned = planning.plan(PROFILE)
    names = [chapter.name for chapter in planned]
    if unknown := sorted(set(only) - set(names)):
        raise UserError(f"no chapter {unknown[0]!r}: choose from {', '.join(names)}")
    for chapter in planned:
        groups = chapter.about.evidence if not only or chapter.name in only else []
        known = {experiment.name: experiment for experiment in found.experiments(chapter.package)} if groups else {}
        for group in groups:
            for name, seed in itertools.product(group.experiments, group.seeds):
                if name not in known:
                    raise UserError(f"chapter {chapter.name} asks for evidence of {name!r}, which it does not measure")
                if known[name].timed == timed:
                    values = chapter.values() | group.parameters | {"seed": seed}
                    yield Cell(chapter.name, group.role, known[name], known[name].settings.checked(**values))


def make(timed: bool, only: Iterable[str] = ()) -> int:
    """Make, record and cite every cell that is missing here; return how many."""
    # What a library is held to by the environment is a kind of its own, and nothing else is recorded of it.
    held_back = bool(processors.LIMIT.search(machine.describe("cpu")["processor"]))
    asked = [cell for cell in cells(timed, only) if (cell.role == evidence.HELD_BACK) == held_back]
    waiting = [cell for cell in asked if not cell.is_recorded()]
    progress.note(f"cells: {len(asked)}, recorded for this kind of processor: {len(asked) - len(waiting)}")
    if not waiting:
        return 0
    if (commit := machine.commit()).endswith("+"):
        remedy = "commit first, so that others can make the same"
        raise UserError(f"the checkout differs from commit {commit[:-1]}: {remedy}")
    if not timed:
        # Bits depend on the number of threads; with one they are the same on a larger machine of the kind.
        os.environ[THREADS_VARIABLE] = "1"
    # In the last minute: more than what this command itself needs to begin.
    elif (load := os.getloadavg()[0]) > 0.7:
        busy = f"busy (load {load:.1f} in the last minute)"
        raise UserError(f"this machine is {busy}: evidence of time needs it alone; wait")
    took: dict[str, list[float]] = defaultdict(list)
    for place, cell in enumerate(waiting):
        # As long as cells of the same experiment took here, or as this one took elsewhere.
        left = [fmean(took[name]) if took[name := each.experiment.name] else each.seconds() for each in waiting[place:]]
        known = [seconds for seconds in left if seconds is not None]
        more = f", and {len(left) - len(known)} that no processor has yet" if len(left) > len(known) else ""
        progress.note(f"{place + 1} of {len(waiting)}: {cell.label}; about {sum(known) / 60:.0f} min left{more}")
        began = time.monotonic()
        run = cell.experiment.run(cell.settings)
        if run is None:
            missing = "is the trained model fetched, and the engine there that it measures?"
            raise UserError(f"{cell.label}: nothing to measure with these settings; {missing}")
        folder = recording.record(run.folder)
        evidence.cite(cell.chapter, cell.role, folder)
        took[cell.experiment.name].append(time.monotonic() - began)
        progress.note(f"  {took[cell.experiment.name][-1]:.0f} s; recorded in {folder}")
    return len(waiting)
