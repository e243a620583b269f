"""Fixtures of the tests of both memories."""

from tests.infer.devices import device

__all__ = ["device"]
