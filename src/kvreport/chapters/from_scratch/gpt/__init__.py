"""The thread's small GPT: model, caches, training and checkpoints."""
