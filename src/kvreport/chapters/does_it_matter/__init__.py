"""The chapter on whether the difference matters."""
