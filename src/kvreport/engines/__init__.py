"""Engines that serve the book's model: each in an environment of its own, none needed to build the book."""
