"""Published rows with contrary ones put among them, and what a sentence says of these."""

import functools

from planted import with_rows

from kvreport.publishing import found as found_in
from kvreport.publishing import statements
from kvreport.publishing.found import Found

published = functools.cache(found_in.published)


def put(found: Found, experiment: str, where: str = "", **values: str) -> Found:
    """Change columns of some of an experiment's rows; both are written as pandas reads them."""
    rows = found[experiment].copy()
    chosen = rows.eval(where) if where else rows.index == rows.index
    for column, value in values.items():
        rows[column] = rows[column].mask(chosen, rows.eval(value))
    return with_rows(found, **{experiment: rows})


def outcome(chapter: str, name: str, experiment: str, where: str = "", **values: str) -> str:
    """Hold a sentence against changed rows of the first processor on whose own rows it holds."""
    statement = found_in.measures_of(chapter).STATEMENTS[name]
    found = next(of for of in published(chapter).values() if statements.check(statement, of).outcome == "holds")
    return statements.check(statement, put(found, experiment, where, **values)).outcome
