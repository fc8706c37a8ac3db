"""Is it a bug or rounding: a model measured at several roundoffs, the judge of the rows, and bugs to try it on."""
