"""The run-time check of annotations that the test suite switches on for the whole package."""

from collections.abc import Callable
from typing import Any

from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its annotations checked in every call.

    jaxtyping decorates methods one by one, where beartype cannot know what `Self` is: those stay unchecked.
    """
    try:
        return beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
