"""The chapter on where drift begins."""
