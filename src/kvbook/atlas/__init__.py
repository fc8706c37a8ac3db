"""The atlas: a tiny random model of every causal architecture of transformers, and what its cache does.

The names that its rows go by stand here, apart from what makes the rows, so that reading them takes no torch.
"""

from kvbook.diagnosis import execution_paths

# Tokens of a text, of one that is looked at quickly, and of a window where a configuration has one.
LENGTH, SHORT, WINDOW = 24, 16, 8
# In which row-invariant arithmetic is tried, and the first operation that needs it is looked for.
SWITCHED = ("float32", "bfloat16")
PATHS = tuple(execution_paths.of(execution_paths.ATLAS))
# Those of which more is recorded, or said.
CHUNKED, STATIC, PADDED, RIGHT, CROPPED, WHOLE = (
    "chunks", "static cache", "left padding", "right padding", "cropped", "cache as long as the prompt"
)
