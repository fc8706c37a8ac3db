"""Tables of the chapter on bug or rounding, as its page shows them."""

import pandas as pd

from kvbook import paths
from kvbook.settings import read_yaml
from kvreport.chapters.bug_or_rounding import rows


def who_reports(counted: pd.DataFrame) -> pd.DataFrame:
    """List every symptom that counts as reported, with its place and what is known of its cause."""
    found = counted[counted["whose"] == rows.REPORTED]
    cause = found["inferred"].map({True: "inferred", False: "shown"}).where(found["bug"], "")
    return pd.DataFrame({
        "document": found["document"], "where": found["place"], "symptom": found["symptom"].map(rows.named),
        "what it is": found["kind"], "cause": cause, "n": found["files"],
    })


def advice() -> list[dict[str, str]]:
    """Read the lines of the decision table."""
    return read_yaml(paths.DATA / "advice.yaml")


def decisions(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Lay the advice out, each line under the verdict on its symptom in these rows."""
    table = []
    for line in advice():
        kinds = set(verdicts.loc[verdicts["symptom"] == line["symptom"], "kind"])
        cause, remedy = line["cause"], line["remedy"]
        # What is bitwise identical on some texts may round on others.
        if not kinds <= ({"rounding", "exact"} if line["kind"] == "rounding" else {line["kind"]}):
            cause, remedy = "this run does not show why", "Run `kvbook check` on your model"
        table.append({
            "your symptom": line["seen"], "what it is": f"**{', '.join(sorted(kinds)) or 'not run'}**: {cause}",
            "what to do": f"{remedy}. See {line['evidence']}.",
        })
    return pd.DataFrame(table)
