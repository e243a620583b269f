"""Swaps of KV blocks between device and host memory, as XLA custom calls inside a jitted step.

`HostPool` owns the host pages; `assign_slots`, `swap_in` and `write_pages` are called inside `jax.jit`.
"""

from nosa_jax.ffi.handlers import Assignment, TransferList, assign_slots, swap_in, write_pages
from nosa_jax.ffi.pool import HostMemoryError, HostPool, PoolClosedError, PoolStats
from nosa_jax.ffi.registration import has_cuda, status

__all__ = [
    "Assignment",
    "HostMemoryError",
    "HostPool",
    "PoolClosedError",
    "PoolStats",
    "TransferList",
    "assign_slots",
    "has_cuda",
    "status",
    "swap_in",
    "write_pages",
]
