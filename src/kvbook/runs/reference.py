"""What recorded rows say of rounding, by dtype and depth, as the one small file that tests take tolerances from."""

import json
from pathlib import Path
from typing import Any

from kvbook import UserError
from kvbook.diagnosis import tolerance
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.runs import records

_EXPERIMENT = "layer_drift"


def make(run: records.Run) -> dict[str, Any]:
    """Take the largest relative drift over texts, by dtype and layer, in roundoffs."""
    if run.about["experiment"] != _EXPERIMENT:
        raise UserError(f"{run.folder.name} is a run of {run.about['experiment']}: name one of {_EXPERIMENT}")
    hidden = run.rows[run.rows["place"] == "hidden"]
    largest = hidden.groupby(["dtype", "layer"])["relative_rms"].max()
    return {
        "made_by": f"kvbook records reference {run.folder.name}",
        "run": {"experiment": _EXPERIMENT, "folder": run.folder.name, "hash": run.about["hash"],
                "rows_sha256": run.about["rows_sha256"]},
        "model": run.about["models"][0]["name"], "processor": run.about["machine"]["processor"],
        "torch": run.about["machine"]["torch"],
        "texts": int(hidden.groupby(["model", "dtype"])["sample"].nunique().max()),
        "tokens": int(hidden["n_tokens"].max()),
        "roundoffs": {
            dtype: [float(f"{drift / UNIT_ROUNDOFF[dtype]:.4g}") for drift in largest[dtype].sort_index()]
            for dtype in sorted(hidden["dtype"].unique())
        },
    }


def write(run: records.Run, to: Path = tolerance.FILE) -> Path:
    """Write the file that the library ships."""
    to.write_text(json.dumps(make(run), indent=1) + "\n", "utf-8")
    return to
