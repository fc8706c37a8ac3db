"""The forum thread's model: a small character-level GPT of our own, and the ways in which it can read a text."""
