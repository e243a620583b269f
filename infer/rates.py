"""What this machine's memories can do, measured: the floors that a decode step is compared with."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class DeviceRates:
    """Bytes per second: read from device memory, and from host memory over the link."""

    memory: float
    link: float


def measure_rates(memory_bytes: int = 2**32, link_bytes: int = 2**30) -> DeviceRates:
    """Time the sum of an array that is larger than the caches, and a copy from pinned host memory.

    Both are medians of several; the arrays are freed again. On a CPU the "link" is a copy within its memory.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        memory_bytes, link_bytes = 2**28, 2**27
    # Values that change, so that nothing is folded away, and one long array, so that launching costs nothing.
    array = jax.jit(lambda: jnp.arange(memory_bytes // 4, dtype=jnp.float32))()
    total = jax.jit(lambda x, c: (x + c).sum())
    state = {"carry": jnp.zeros(())}

    def read() -> None:
        for _ in range(4):
            state["carry"] = total(array, state["carry"] * 0)
        state["carry"].block_until_ready()

    memory = 4 * memory_bytes / _median_seconds(read)
    del array, state["carry"]
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else None
    source = jax.device_put(
        jnp.ones(link_bytes // 4, jnp.float32), jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    )
    target = jax.sharding.SingleDeviceSharding(device)

    def copy() -> None:
        jax.device_put(source, target, may_alias=False).block_until_ready()

    return DeviceRates(memory, link_bytes / _median_seconds(copy))


def _median_seconds(run: Callable[[], None], repeats: int = 7) -> float:
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
