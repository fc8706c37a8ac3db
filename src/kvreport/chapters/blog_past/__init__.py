"""The chapter on the blog post about past_key_values."""
