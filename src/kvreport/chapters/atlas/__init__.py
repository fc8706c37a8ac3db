"""The chapter on the atlas: what the cache of every causal architecture of transformers does."""

from kvbook.settings import Settings, some


class AtlasSettings(Settings):
    """Settings of the chapter on the atlas.

    Attributes
    ----------
    architectures : tuple of str
        Model types; ``"all"`` for every causal one of the installed transformers.
    """

    architectures: some(str) = ("all",)
