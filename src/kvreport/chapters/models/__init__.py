"""The chapter on the models."""

from kvbook.settings import Count, DTypeName, Settings, Text


class ModelsSettings(Settings):
    """Settings of the page on the models.

    Attributes
    ----------
    model : str
        ``"all"`` for every family of the registry (every stand-in that ships); or names as elsewhere, with commas
        between them.
    dtype : str
        Of weights and arithmetic.
    prompt : str
        What every model goes on from.
    n_new_tokens : int
        Tokens that each writes.
    """

    model: Text = "all"
    dtype: DTypeName = "float32"
    prompt: Text = "def read_lines(path):\n"
    n_new_tokens: Count = 32
