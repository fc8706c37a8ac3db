"""Comparing a rollout's log-probabilities with a trainer's: ``kvbook scores``, as a function."""

from collections.abc import Sequence
from typing import Any

from kvbook.scores import outcome, tables


def check_scores(rollout: Any, trainer: Any, *, controls: Sequence[Any] = (), mask: Any = None) -> outcome.Outcome:
    """Say whether two sets of log-probabilities of the same tokens differ by rounding or by a fault.

    Parameters
    ----------
    rollout, trainer : DataFrame, tensor or array
        A table with the columns ``id``, ``position``, ``token`` and ``logprob``, or log-probabilities of shape
        (sequences, tokens).
    controls : sequence of the same
        Each the same computation in another shape and without reused state, in the rollout's dtype, such as a full
        pass in another batch size.  Without one, a gap as large as that of 16 bits cannot be told from a fault.
    mask : tensor or array, optional
        Of shape (sequences, tokens): which tokens were sampled.

    Returns
    -------
    kvbook.scores.outcome.Outcome
        Print it; ``status`` is the exit status of the command.

    Raises
    ------
    UserError
        When the tables cannot be compared; the message says what to do.

    Examples
    --------
    >>> import kvbook, numpy as np
    >>> rollout = np.log(np.full((4, 3), 0.5))
    >>> kvbook.check_scores(rollout, rollout + 1e-6).verdict
    'rounding'
    """
    a, b, *others = (tables.frame(given, mask) for given in (rollout, trainer, *controls))
    return outcome.of(tables.join(a, b, others))
