"""How the book runs: its chapters, evidence, sweeps and the bench."""
