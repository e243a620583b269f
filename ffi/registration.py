"""Makes the handlers known to JAX, once, when the package is imported."""

import functools
from typing import Any

import jax

from nosa_jax.ffi import _cpu


def has_cuda() -> bool:
    """Whether the CUDA library was built. It says nothing about a GPU being there."""
    return _cpu.CUDA_STATE.startswith("built")


def status() -> str:
    """One line on what was built."""
    return f"nosa_jax.ffi: CPU handlers built; CUDA library: {_cpu.CUDA_STATE}"


@functools.cache
def register() -> None:
    """Register every handler under the same name for platform cpu and platform CUDA.

    No backend is started and no type registered: on the CPU, types registered before the backend starts make its
    first operation fail. Without the CUDA library handlers are registered whose errors say how to build it.
    """
    for name, handler in _cpu.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    for name, handler in cuda_handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")


def cuda_handlers() -> dict[str, Any]:
    """The handlers of platform CUDA, or under the same names ones that say how to build them."""
    if not has_cuda():
        return _cpu.not_built_handlers()
    from nosa_jax.ffi import _cuda

    return _cuda.handlers()
