"""The chapter on bug or rounding."""
