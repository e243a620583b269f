"""What this machine's memories can do, measured: the floors that a decode step is compared with."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

_CHAINED = 8  # reads of which the host waits for the last
_LEAST = 7


@dataclass(frozen=True)
class DeviceRates:
    """Bytes per second: read from device memory, and from host memory over the link."""

    memory: float
    link: float


def measure_rates(memory_bytes: int = 2**32, link_bytes: int = 2**30) -> DeviceRates:
    """Time the sum of an array that is larger than the caches, and a copy from pinned host memory.

    Each is the best of as many as a second takes: a device that was idle needs a while to reach its clocks, and a slow
    moment here would make every step look near its floor. The arrays are freed again. On a CPU the "link" is a copy
    within its memory, and a few have to do.
    """
    device, trial_seconds = jax.devices()[0], 1.0
    if device.platform == "cpu":
        memory_bytes, link_bytes, trial_seconds = 2**28, 2**27, 0.0
    # Values that change, so that nothing is folded away, and one long array, so that launching costs nothing.
    array = jax.jit(lambda: jnp.arange(memory_bytes // 4, dtype=jnp.float32))()
    total = jax.jit(lambda x, c: (x + c).sum())
    state = {"carry": jnp.zeros(())}

    def read() -> None:
        for _ in range(_CHAINED):
            state["carry"] = total(array, state["carry"] * 0)
        state["carry"].block_until_ready()

    memory = _CHAINED * memory_bytes / _best_seconds(read, trial_seconds)
    del array, state["carry"]
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else None
    source = jax.device_put(
        jnp.ones(link_bytes // 4, jnp.float32), jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    )
    target = jax.sharding.SingleDeviceSharding(device)

    def copy() -> None:
        jax.device_put(source, target, may_alias=False).block_until_ready()

    return DeviceRates(memory, link_bytes / _best_seconds(copy, trial_seconds))


def _best_seconds(run: Callable[[], None], trial_seconds: float) -> float:
    """Of at least `_LEAST` runs, and of so many seconds of them."""
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) <= _LEAST or time.perf_counter() - begun < trial_seconds:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])  # the first compiles
