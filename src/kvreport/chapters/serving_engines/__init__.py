"""The chapter on serving engines."""
