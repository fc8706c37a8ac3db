"""How fast this book's own code is, as ratios."""
