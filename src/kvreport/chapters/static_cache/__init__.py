"""The chapter on the notebook about static and dynamic caches."""
