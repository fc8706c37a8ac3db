"""Fixtures for the tests of models and of decoding loops; nothing is imported before a test asks for one."""

from collections.abc import Callable

import pytest


@pytest.fixture
def assert_cache_matches() -> Callable[..., None]:
    """Return `kvbook.assert_cache_matches`."""
    import kvbook

    return kvbook.assert_cache_matches


@pytest.fixture
def assert_step_matches() -> Callable[..., None]:
    """Return a function that takes what `kvbook.check_step` takes, and fails with its report if that is not sound."""
    import kvbook

    def check(step, ids, **options) -> None:
        found = kvbook.check_step(step, ids, **options)
        if found.status:
            raise AssertionError(f"the loop is not sound\n{found}")

    return check
