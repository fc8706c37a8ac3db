"""How the book runs: kernels, chapters side by side, sweeps and the bench."""
