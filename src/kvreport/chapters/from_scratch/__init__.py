"""The chapter on the forum thread about a model from scratch."""
