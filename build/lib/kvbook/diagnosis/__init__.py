"""Is it a bug or is it rounding: measuring a model at several roundoffs, judging the rows, and bugs to try the judge on."""
