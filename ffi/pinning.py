"""Whether the system lets this process pin as much host memory as a pool needs, asked before the pool is mapped."""

import resource
from typing import TYPE_CHECKING

from nosa_jax.ffi import _cpu

if TYPE_CHECKING:
    from nosa_jax.ffi import _cuda

HostMemoryError = _cpu.HostMemoryError
HUGE_PAGE = 2**21
MOST_ON_TRIAL = 2**26  # more would take time and memory of its own


def bytes_on_trial(nbytes: int, limit: int | None, available: int) -> int | None:
    """How much to pin on trial before a pool of `nbytes` is mapped; None where a trial tells nothing or costs too much.

    CUDA pins through its own kernel module, which may or may not count against the limit on locked memory. So a pool
    above the limit is no reason to refuse; a little more than the limit that cannot be pinned is one.

    Args:
        nbytes: bytes of the pool.
        limit: the soft limit on locked memory, None for no limit.
        available: bytes of host memory that may be taken; a pool above them is refused anyway.
    """
    if limit is None or not limit < nbytes <= available:
        return None
    trial = min(limit + HUGE_PAGE, nbytes)
    return trial if trial <= MOST_ON_TRIAL else None


def require_pinnable(nbytes: int, gpu: int, available: int) -> None:
    """Raise HostMemoryError where a pool of `nbytes` is above the limit on locked memory, and that limit applies."""
    limit = _locked_memory_limit()
    trial = bytes_on_trial(nbytes, limit, available)
    reason = None if trial is None else _why_not_pinned(gpu, trial)
    if reason is not None:
        raise HostMemoryError(
            f"host pool: {nbytes} bytes of host memory are to be pinned; the limit on locked memory (ulimit -l) is "
            f"{limit} bytes, and pinning {trial} bytes on trial failed ({reason}). Raise the limit "
            "(`ulimit -l unlimited`, for a container `--ulimit memlock=-1`), or plan fewer or shorter requests."
        )


def pin(native: _cpu.HostPool, n_pages: int, page_bytes: int, gpu: int) -> "_cuda.PinnedPool":
    """Register the slab with CUDA. Raises HostMemoryError, with the slab closed."""
    from nosa_jax.ffi import _cuda

    try:
        return _cuda.PinnedPool(gpu, *native.handle, native.address, n_pages, page_bytes)
    except RuntimeError as error:
        native.close()
        raise HostMemoryError(f"host pool: {error}. Plan fewer or shorter requests, or raise the limit.") from error


def _locked_memory_limit() -> int | None:
    """The soft limit in bytes, None for none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _why_not_pinned(gpu: int, nbytes: int) -> str | None:
    """What CUDA says to so many bytes, which are given back at once; None if it pins them."""
    from nosa_jax.ffi import _cuda

    return _cuda.why_not_pinned(gpu, nbytes)
