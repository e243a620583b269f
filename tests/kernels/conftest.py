"""Shared by the kernels' tests."""

import pytest


@pytest.fixture(autouse=True)
def no_races(capsys):
    """The interpreter of GPU kernels reports a race by printing it, and goes on."""
    yield
    printed = capsys.readouterr().out
    assert "RACE" not in printed, printed
