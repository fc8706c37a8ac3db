"""The chapter on issue 25420."""
