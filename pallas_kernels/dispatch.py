"""Which implementation of an operation runs.

A named implementation runs or raises `NotImplementedError` with the reason; `None` picks one that works here.
"""

from typing import Literal, get_args

Implementation = Literal["reference", "xla", "mosaic_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


def resolve(operation: str, implementation: str | None, *, available: tuple[str, ...]) -> str:
    """The implementation to run for `operation`.

    Raises:
      ValueError: the name is not one of `IMPLEMENTATIONS`.
      NotImplementedError: the name is known, but this operation does not have it.
    """
    if implementation is None:
        return "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be None or one of {', '.join(IMPLEMENTATIONS)}")
    if implementation not in available:
        raise NotImplementedError(
            f"{operation} has no {implementation!r} implementation; use one of {', '.join(available)}, "
            "or None to let the library choose"
        )
    return implementation
