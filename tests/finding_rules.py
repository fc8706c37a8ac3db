"""What the first sentence of a figure's caption must be."""

import re


def broken(captions: dict[str, dict[str, str]], findings: dict[str, str]) -> list[str]:
    """Name what is wrong: a figure whose caption begins otherwise than with its finding, or a finding that is none.

    Parameters
    ----------
    captions, findings : dict
        As the functions of these names in a chapter's text module return them.
    """
    found = [f"{name}: no finding" for name in captions if name.startswith("fig-") and name not in findings]
    for name, finding in findings.items():
        # An abbreviation or a number ends no sentence: what follows it is no capital.
        if not finding.endswith(".") or re.search(r"[.?!] [A-Z]", finding):
            found.append(f"{name}: not one sentence")
        if name in captions and not captions[name]["caption"].startswith(finding + " "):
            found.append(f"{name}: the caption begins otherwise")
    return found
