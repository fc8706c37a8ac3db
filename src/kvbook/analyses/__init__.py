"""From rows to what a chapter says: tables of estimates that figures, verdicts and prose share."""
