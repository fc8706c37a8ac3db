"""Every model of the book: the registry of families, loading, and the recipe of the stand-ins."""
