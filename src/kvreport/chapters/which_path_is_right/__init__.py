"""The chapter on which path is right."""
