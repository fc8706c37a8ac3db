"""The chapter on serving engines."""

from kvbook.settings import Count, Settings, at_least, some


class ServingEnginesSettings(Settings):
    """Settings of the chapter on serving engines.

    Attributes
    ----------
    populations : tuple of str
        Of which texts the prompts are the beginnings: ``"stdlib"``, ``"english"``, ``"chat"``, or folders.
    n_samples : int
        Prompts of each.
    prompt_tokens : int
        Tokens of each.
    new_tokens : int
        Tokens that are written after each, greedily; fewer where the text ends.
    """

    populations: some(str) = ("stdlib",)
    n_samples: Count = 4
    prompt_tokens: at_least(2) = 49
    new_tokens: at_least(2) = 16
