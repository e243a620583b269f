"""What callers may pass for a number."""

from numbers import Integral, Real
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, Python's or NumPy's; a truth value is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether a value is a number, Python's or NumPy's; a truth value is none."""
    return isinstance(value, Real) and not isinstance(value, bool)
