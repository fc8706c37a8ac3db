"""The experiments: each module has `run(settings)`, the only thing that a chapter, a sweep or the command line calls."""
