"""Swaps of KV blocks between device and host memory, as XLA custom calls inside a jitted step.

`HostPool` owns the host pages. `fetch_blocks` and `store_blocks` are what a decode step calls inside `jax.jit`, with
`list_blocks` in place of the former where a kernel copies while it attends; `assign_slots`, `swap_in` and `write_pages`
are the single pieces.
"""

from nosa_jax.ffi.append import MAX_HEAD_DIM, EvictionHead, PooledStatistics, append_token
from nosa_jax.ffi.fetching import Fetched, ListedPages, NewToken, fetch_blocks, list_blocks, why_not_listed
from nosa_jax.ffi.handlers import Assignment, TransferList, assign_slots, store_blocks, swap_in, write_pages
from nosa_jax.ffi.pinning import HostMemoryError
from nosa_jax.ffi.pool import HostPool, PoolClosedError, PoolStats
from nosa_jax.ffi.registration import has_cuda, status

__all__ = [
    "MAX_HEAD_DIM",
    "Assignment",
    "EvictionHead",
    "Fetched",
    "HostMemoryError",
    "HostPool",
    "ListedPages",
    "NewToken",
    "PoolClosedError",
    "PoolStats",
    "PooledStatistics",
    "TransferList",
    "append_token",
    "assign_slots",
    "fetch_blocks",
    "has_cuda",
    "list_blocks",
    "status",
    "store_blocks",
    "swap_in",
    "why_not_listed",
    "write_pages",
]
