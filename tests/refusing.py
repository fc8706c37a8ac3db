"""What a user reads where something is refused."""

from collections.abc import Callable

import pytest

from kvbook import UserError


def refusal(call: Callable[..., object], *arguments: object, **named: object) -> str:
    """Return the line with which a call refuses what it was given."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    return str(caught.value)
