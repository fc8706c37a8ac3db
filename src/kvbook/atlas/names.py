"""The names that rows of the atlas go by; apart from what makes the rows, so that reading them takes no torch."""

# Tokens of a text, and of a window where a configuration has one.
LENGTH, WINDOW = 24, 8
# In which row-invariant arithmetic is tried, and the first operation that needs it is looked for.
SWITCHED = ("float32", "bfloat16")
PATHS = STEPWISE, CHUNKED, STATIC, BATCH, PADDED, PADDED_STEPWISE, CROPPED, WHOLE = (
    "token by token", "chunks", "static cache", "batch", "left padding", "left padding, token by token", "cropped",
    "cache as long as the prompt",
)
