"""What issue 25420 claims of a prefill: the rule by which it is judged, and what of the rows it looks at."""

from kvbook.measuring import estimates
from kvreport.chapters.where_drift_begins import tables
from kvreport.chapters.where_drift_begins.results import Results
from kvreport.publishing.judging import Check, Evidence, Measured, fact
from kvreport.publishing.rules import HALF, Bound, Quantity, Rule, anyone, every, refuted, reproduced
from kvreport.publishing.verdicts import Claims, weights_of
from kvreport.publishing.wording import DTYPES

DIFFERING = Quantity(
    "prompts whose hidden states, keys, values or logits differ in a bit", series="dtype", form="{:.0f}"
)
EQUAL = Quantity("share of prompts in which none does", "file", "dtype")


def _prefill_exact(results: Results) -> Evidence:
    found = tables.equal_prefills(results.prefills.rows)
    evidence = {
        DIFFERING: [fact((~of["equal"]).sum(), DTYPES[dtype]) for dtype, of in found.groupby("dtype", sort=False)],
        EQUAL: [
            Measured(DTYPES[dtype], *estimates.share_over(of, of["equal"]))
            for dtype, of in found.groupby("dtype", sort=False)
        ],
    }
    beside = "what every operation of the pass gives is compared too"
    return Evidence(weights_of(results.prefills.about["models"]), evidence, beside)


_EXACTLY = Bound(0, "document", "“exactly the same”")

CHECKS = {
    "prefill-exact": Check(
        Rule(
            (
                refuted(anyone(DIFFERING, "above", _EXACTLY), one_is_enough=True),
                reproduced(every(DIFFERING, "at most", _EXACTLY), every(EQUAL, "above", HALF)),
            )
        ),
        _prefill_exact,
    )
}

CLAIMS = Claims("issue-25420", CHECKS, chapter="05_where_drift_begins", words="where-drift-begins")
