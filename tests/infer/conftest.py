"""Fixtures of the tests of engines and of scheduling."""

import pytest

from tests.infer.devices import device
from tests.infer.scheduling import assert_all_free, engine_of, solo_tokens

__all__ = ["device", "engine", "solo"]


@pytest.fixture(scope="session")
def solo():
    """What each request gets alone."""
    return solo_tokens()


@pytest.fixture
def engine(request):
    """An engine that must have all its pages and rows back in the end; its parameter is `steps_per_dispatch`."""
    with engine_of(steps_per_dispatch=getattr(request, "param", 1)) as engine:
        yield engine
        assert_all_free(engine)
