"""The KV cache over two memories: device slots, block tables and replacement, host pages.

`CacheLayout` fixes every shape, `DecodeState` is the cache as a pytree, `PageAllocator` hands out host pages.
"""

from nosa_jax.offload.layout import CacheLayout, MemoryItem
from nosa_jax.offload.pages import OutOfPagesError, PageAllocator
from nosa_jax.offload.state import CacheStats, DecodeState, LayerCache, StepCounts, init_state

__all__ = [
    "CacheLayout",
    "CacheStats",
    "DecodeState",
    "LayerCache",
    "MemoryItem",
    "OutOfPagesError",
    "PageAllocator",
    "StepCounts",
    "init_state",
]
