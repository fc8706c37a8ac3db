"""How fast this book's own code is, as ratios; and how long its chapters would take on other machines."""
