"""The chapter on the models."""
