"""The chapter on exact caches."""
