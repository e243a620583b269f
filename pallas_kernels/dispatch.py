"""Which implementation of an operation runs.

A named implementation runs or raises `NotImplementedError` with the reason; `None` picks one that works on the device
that the program is compiled for.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax
from jax import lax

Implementation = Literal["reference", "xla", "mosaic_gpu", "library"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

logger = logging.getLogger("nosa_jax")

_preferred = jax.make_user_context(default_value=None)  # part of the key of every jit cache


@contextlib.contextmanager
def default_implementation(implementation: Implementation | None) -> Iterator[None]:
    """Run what is called or traced inside this context with the named implementation where a call names none.

    Operations that have no implementation of that name choose for themselves, as without this context.

    Raises:
      ValueError: the name is not one of `IMPLEMENTATIONS`.
    """
    _check(implementation)
    with _preferred(implementation):
        yield


def run(
    operation: str,
    implementation: str | None,
    args: tuple[Any, ...],
    *,
    mosaic_gpu: Callable[..., Any] | None = None,
    library: Callable[..., Any] | None = None,
    unsupported: str | None = None,
    **others: Callable[..., Any],
) -> Any:
    """Call one of an operation's implementations with `args`.

    Args:
      operation: its name, for messages.
      implementation: the name asked for. None stands for the one of the surrounding `default_implementation` if the
        operation has it; otherwise for the GPU's own, where the program is compiled for a GPU that can run it and the
        shapes allow it; otherwise for "xla".
      args: arrays, or None in their place.
      mosaic_gpu, library: the GPU's own implementation, if there is one: a kernel of this package, or another
        library's.
      unsupported: why that one does not take these shapes or dtypes; None when it does.
      others: the implementations that run anywhere, by name; "xla" is among them.

    Raises:
      ValueError: the name is not one of `IMPLEMENTATIONS`.
      NotImplementedError: the operation does not have the named implementation, or it does not run on this machine
        or with these arguments.
    """
    _check(implementation)
    own, on_gpu = ("mosaic_gpu", mosaic_gpu) if mosaic_gpu is not None else ("library", library)
    names = [*others, *([own] if on_gpu is not None else [])]
    if implementation is None and _preferred.value in names:
        implementation = _preferred.value
    if implementation is not None and implementation not in names:
        raise NotImplementedError(
            f"{operation} has no {implementation!r} implementation; use one of {', '.join(names)}, "
            "or None to let the library choose"
        )
    if implementation in others:
        return others[implementation](*args)
    reason = unsupported or (why_no_kernels() if own == "mosaic_gpu" else why_no_gpu())
    if implementation is None and (on_gpu is None or reason is not None):
        if on_gpu is not None and _gpus():
            _say_once(operation, reason or "")
        return others["xla"](*args)
    assert on_gpu is not None
    if implementation is None:
        return lax.platform_dependent(*args, cuda=on_gpu, default=others["xla"])
    if reason is not None:
        raise NotImplementedError(f"{operation} cannot run its {own!r} implementation: {reason}")
    return on_gpu(*args)


def _check(implementation: str | None) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be None or one of {', '.join(IMPLEMENTATIONS)}")


def why_no_kernels() -> str | None:
    """Why this process cannot run the Mosaic GPU kernels at all, or None if it can."""
    gpus = _gpus()
    if not gpus:
        return why_no_gpu()
    versions = sorted({str(getattr(gpu, "compute_capability", "unknown")) for gpu in gpus})
    if any(version.split(".")[0] != "9" for version in versions):
        return f"the kernels use wgmma, which compute capability 9.x has; the GPUs here have {', '.join(versions)}"
    return None


def why_no_gpu() -> str | None:
    """Why this process cannot run what needs any CUDA device, or None if it can."""
    return None if _gpus() else "JAX sees no CUDA device"


@functools.cache
def _gpus() -> tuple[jax.Device, ...]:
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:  # no such platform
        return ()


@functools.cache
def _say_once(operation: str, reason: str) -> None:
    logger.warning("%s runs through XLA on this GPU: %s", operation, reason)
