"""What issue 25420 claims of the paths' precision: the rule by which it is judged, and what of the rows it looks at."""

from kvreport.chapters.which_path_is_right import path_errors
from kvreport.chapters.which_path_is_right.results import Results
from kvreport.publishing.judging import UNFITTED, Check, Evidence, Measured, missing
from kvreport.publishing.rules import Bound, Quantity, Rule, every, refuted, reproduced
from kvreport.publishing.verdicts import Claims, weights_of

LOSS = Quantity("error of bf16 logits against fp64 with a cache, over that without", "file", "model")
_TENTH = Bound(1.1, "ours", "a tenth more error is a loss", "ratio")


def _caching_loses_precision(results: Results) -> Evidence:
    table, rows = results.series, results.errors.rows
    table = table[(table["path"] == path_errors.CACHED) & (table["dtype"] == "bfloat16")]
    weights = weights_of(results.errors.about["models"])
    if table.empty:
        return missing(weights, "0 rows in bf16")
    files = rows[rows["dtype"] == "bfloat16"].groupby("model")["source"].nunique()
    found = [Measured(r.model, r.ratio or UNFITTED, int(files[r.model])) for r in table.itertuples()]
    return Evidence(weights, {LOSS: found})


CHECKS = {
    "caching-loses-precision": Check(
        Rule((reproduced(every(LOSS, "above", _TENTH)), refuted(every(LOSS, "below", _TENTH)))),
        _caching_loses_precision,
    )
}

CLAIMS = Claims("issue-25420", CHECKS, chapter="03_which_path_is_right", words="which-path")
