"""The chapter on the forum thread about reusing a prompt's cache."""
