"""The chapter on the forum thread about a model from scratch."""

from typing import Annotated, Literal

from pydantic import Field

from kvbook.settings import DTypes, Text, TextSettings, at_least


class ScratchSettings(TextSettings):
    """Settings of the chapter on the forum thread about a model from scratch.

    Attributes
    ----------
    model : str
        ``"small"`` or ``"thread"``, the thread's size, which ship, the latter trained anew for another corpus; or a
        folder that ``python -m kvbook models train-scratch`` wrote.
    weights : {"stand-in", "random"}
        ``"random"`` keeps the model's shape and draws its weights.
    corpus : str
        ``"stdlib"``, a folder, or one text file: what ``"thread"`` is trained on, and whose held-out part is read.
    n_samples : int
        How many texts are scored.
    n_blocks : int
        Length of each, in the model's blocks; the table of positions must reach so far.
    dtypes : tuple of str
        In which logits are compared; losses, texts and times are in the first.
    n_timed : int
        Repetitions of everything that is timed.
    n_new_tokens : int
        Length of the run that is timed as the reply timed its own; prompt and text fit into its model's 256 positions.
    """

    model: Text = "small"
    weights: Literal["stand-in", "random"] = "stand-in"
    n_samples: at_least(2) = 24
    n_blocks: at_least(2) = 8
    dtypes: DTypes = ("float32", "float64")
    n_timed: at_least(2) = 4
    n_new_tokens: Annotated[at_least(1), Field(le=243)] = 50
